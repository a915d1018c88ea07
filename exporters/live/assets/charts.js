// The last half hour, drawn by Plotly, which is loaded once the rest of the page stands.
import {get, read} from "./get.js";

const EVERY_MS = 5000;
const line = (name, colour, dash, symbol) => ({name, colour, dash, symbol});

const CHARTS = [
  {id: "chart-ttft", unit: "s", columns: {
    ttft_miss_p50_seconds: line("miss", "--miss", "dash"), ttft_partial_p50_seconds: line("partial hit", "--other", "dot"), ttft_hit_p50_seconds: line("hit", "--hit", "solid")}},
  {id: "chart-load", unit: "requests", columns: {
    load_max: line("busiest", "--miss", "dash"), load_mean: line("mean", "--other", "dot"), load_min: line("least busy", "--hit", "solid")}},
  {id: "chart-share", unit: "%", columns: {
    hit_ratio: line("from cache", "--hit", "solid"), goodput_ratio: line("goodput", "--miss", "dash")}},
];

export class Charts {
  constructor() {
    this.section = document.getElementById("charts");
    this.next = 0;
    this.history = null;
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", () => this.draw());
  }

  start(plotly) {
    const script = document.createElement("script");
    script.id = this.section.dataset.plotlyStyles;
    script.src = plotly;
    script.addEventListener("load", () => this.draw());
    script.addEventListener("error", () => {
      for (const {id} of CHARTS) document.getElementById(`${id}-text`).textContent = "Not drawn: the plotting library could not be loaded.";
    });
    document.head.append(script);
    return this.update();
  }

  async update() {
    if (performance.now() < this.next) return;
    this.next = performance.now() + EVERY_MS;
    const answer = await get(this.section.dataset.history);
    if (!answer) return;
    this.history = await read(answer, "json");
    this.draw();
  }

  draw() {
    if (!window.Plotly || !this.history) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const x = this.history.unix_seconds.map((seconds) => new Date(seconds * 1000));
    const axis = {gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), fixedrange: true};
    const now = x.at(-1) ?? new Date();
    const start = Math.min(x[0] ?? now, now - 300000);
    for (const {id, unit, columns} of CHARTS) {
      const scale = unit === "%" ? 100 : 1;
      const values = (name) => this.history[name].map((value) => (value === null ? null : value * scale));
      const data = Object.entries(columns).map(([name, look]) => ({
        x, y: values(name), name: look.name, mode: "lines", line: {color: colour(look.colour), dash: look.dash, width: 2},
        hovertemplate: `%{y:.3~s} ${unit}<extra>${look.name}</extra>`}));
      this.describe(id, unit, columns, values);
      const layout = {
        xaxis: {...axis, type: "date", range: [new Date(start), now], nticks: 5, tickformat: "%H:%M", hoverformat: "%H:%M:%S"}, yaxis: {...axis, rangemode: "tozero", ticksuffix: ` ${unit === "requests" ? "" : unit}`, nticks: 5, automargin: true},
        margin: {l: 52, r: 12, t: 6, b: 28}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--text")},
        legend: {orientation: "h", x: 0, y: 1.18}, hovermode: "x", showlegend: true, uirevision: "kept",
        hoverlabel: {bgcolor: colour("--card"), bordercolor: colour("--line"), font: {color: colour("--text")}}};
      if (unit === "%") layout.yaxis.range = [0, 102];
      window.Plotly.react(id, data, layout, {displayModeBar: false, responsive: true});
    }
    this.section.dataset.drawn = String(x.length);
  }

  /** The newest figures in words, for whom the drawing tells nothing. */
  describe(id, unit, columns, values) {
    const known = Object.entries(columns).map(([name, look]) => [look.name, values(name).at(-1)]);
    const figure = (value) => (value === null || value === undefined ? "not known" : `${Number(value.toPrecision(3))} ${unit}`);
    const words = `Now: ${known.map(([name, value]) => `${name} ${figure(value)}`).join(", ")}.`;
    const place = document.getElementById(`${id}-text`);
    if (place.textContent !== words) place.textContent = words;
  }
}
