// The last half hour as three line charts, each also described in words.
import {get, read} from "./get.js";
import {LineChart} from "./line_chart.js";

const EVERY_MS = 5000;
const line = (column, name, colour, dash) => ({column, name, colour, dash});
const short = (value) => String(Number(value.toPrecision(3)));
const seconds = (value) => (value !== 0 && value < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`);

const CHARTS = [
  {id: "chart-ttft", figure: seconds, lines: [
    line("ttft_miss_p50_seconds", "miss", "miss", "dash"), line("ttft_partial_p50_seconds", "partial hit", "other", "dot"),
    line("ttft_hit_p50_seconds", "hit", "hit", "solid")]},
  {id: "chart-load", figure: short, unit: " requests", lines: [
    line("load_max", "busiest", "miss", "dash"), line("load_mean", "mean", "other", "dot"), line("load_min", "least busy", "hit", "solid")]},
  {id: "chart-share", figure: (value) => `${short(value)} %`, scale: 100, most: 100, lines: [
    line("hit_ratio", "from cache", "hit", "solid"), line("goodput_ratio", "goodput", "miss", "dash")]},
];

export class Charts {
  constructor() {
    this.section = document.getElementById("charts");
    this.next = 0;
    this.charts = CHARTS.map((chart) => ({...chart, drawing: new LineChart(document.getElementById(chart.id), chart)}));
  }

  async update() {
    if (performance.now() < this.next) return;
    this.next = performance.now() + EVERY_MS;
    const answer = await get(this.section.dataset.history);
    if (!answer) return;
    const history = await read(answer, "json");
    for (const {id, figure, unit = "", scale = 1, lines, drawing} of this.charts) {
      const values = lines.map(({column}) => history[column].map((value) => (value === null ? null : value * scale)));
      drawing.draw(history.unix_seconds, values);
      const now = lines.map(({name}, k) => {
        const value = values[k].at(-1) ?? null;
        return `${name} ${value === null ? "not known" : figure(value) + unit}`;
      });
      const words = `Now: ${now.join(", ")}.`;
      const place = document.getElementById(`${id}-text`);
      if (place.textContent !== words) place.textContent = words;
    }
    this.section.dataset.drawn = String(history.unix_seconds.length);
  }
}
