// A line chart in SVG: axes with round ticks, a legend, gaps where a value is unknown, and a readout under the pointer.
import {element, html, long} from "./shapes.js";

const HEIGHT = 190;
const MARGIN = {left: 52, right: 12, top: 8, bottom: 24};
const FONT = "12px";
const DASHES = {solid: "", dash: "7 4", dot: "2 3"};
const STEP_SECONDS = [15, 30, 60, 120, 300, 600, 900, 1800];
const LEAST_SPAN_SECONDS = 60;

/** Round numbers from 0 to at least `most`, at most six of them. */
export function ticks(most) {
  const rough = (most || 1) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  return Array.from({length: Math.ceil((most || 1) / step - 1e-9) + 1}, (_, k) => Number((k * step).toPrecision(6)));
}

const clock = (seconds, withSeconds) => new Date(seconds * 1000).toLocaleTimeString([],
  {hour: "2-digit", minute: "2-digit", hour12: false, ...(withSeconds ? {second: "2-digit"} : {})});

export class LineChart {
  /** `lines` are `{name, colour, dash}`, colours being names of custom properties; `most` fixes the top of the axis. */
  constructor(box, {lines, figure, most = null}) {
    Object.assign(this, {box, lines, figure, most});
    this.svg = element("svg", {class: "line-chart", height: HEIGHT, "aria-hidden": "true"});
    const legend = html("ul", {class: "legend", "aria-hidden": "true"}, ...lines.map((line) => html("li", {},
      this.sample(line), line.name)));
    box.replaceChildren(legend, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX));
    this.svg.addEventListener("pointerleave", () => this.readout?.replaceChildren());
    new ResizeObserver(() => this.render()).observe(box);
  }

  sample(line) {
    const svg = element("svg", {width: 26, height: 10});
    svg.append(element("path", {d: "M0 5H26", class: `line ${line.colour}`, "stroke-dasharray": DASHES[line.dash]}));
    return svg;
  }

  /** `seconds` are Unix times, `values` one column a line; null is unknown. */
  draw(seconds, values) {
    Object.assign(this, {seconds, values});
    this.render();
  }

  render() {
    if (!this.seconds?.length || !this.box.clientWidth) return;
    const {seconds, values} = this;
    const width = this.box.clientWidth;
    const end = seconds.at(-1);
    const start = Math.min(seconds[0], end - LEAST_SPAN_SECONDS);
    const marks = ticks(this.most ?? Math.max(0, ...values.flat().filter((value) => value !== null)));
    const top = marks.at(-1);
    this.x = (at) => MARGIN.left + ((at - start) / (end - start)) * (width - MARGIN.left - MARGIN.right);
    this.y = (value) => HEIGHT - MARGIN.bottom - (value / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this.readout = element("g", {class: "readout"});
    this.svg.setAttribute("width", width);
    this.svg.replaceChildren(
      ...marks.flatMap((mark) => [
        element("path", {class: "grid", d: `M${MARGIN.left} ${this.y(mark)}H${width - MARGIN.right}`}),
        element("text", {x: MARGIN.left - 6, y: this.y(mark) + 4, "text-anchor": "end"}, this.figure(mark))]),
      ...this.times(start, end, width).map((at) => element("text",
        {x: this.x(at), y: HEIGHT - 6, "text-anchor": "middle"}, clock(at, end - start < 240))),
      ...this.lines.map((line, k) => element("path",
        {class: `line ${line.colour}`, "stroke-dasharray": DASHES[line.dash], d: this.path(values[k])})),
      this.readout);
  }

  times(start, end, width) {
    const room = Math.max(2, Math.floor(width / 90));
    const step = STEP_SECONDS.find((size) => (end - start) / size <= room) ?? 3600;
    const found = [];
    for (let at = Math.ceil(start / step) * step; at <= end; at += step) {
      if (this.x(at) > MARGIN.left + 14 && this.x(at) < width - 26) found.push(at);
    }
    return found;
  }

  path(column) {
    let drawn = "";
    column.forEach((value, k) => {
      if (value === null) return;
      const joined = k > 0 && column[k - 1] !== null;
      const alone = !joined && (k + 1 >= column.length || column[k + 1] === null);
      drawn += `${joined ? "L" : "M"}${this.x(this.seconds[k]).toFixed(1)} ${this.y(value).toFixed(1)}${alone ? "h2" : ""}`;
    });
    return drawn;
  }

  point(clientX) {
    const {seconds, values} = this;
    if (!this.readout) return;
    const x = clientX - this.svg.getBoundingClientRect().left;
    const at = seconds.reduce((best, time, k) => (Math.abs(this.x(time) - x) < Math.abs(this.x(seconds[best]) - x) ? k : best), 0);
    const words = [clock(seconds[at], true), ...this.lines.map((line, k) => {
      const value = values[k][at];
      return `${line.name} ${value === null ? "unknown" : this.figure(value)}`;
    })];
    const width = Math.max(...words.map((text) => long(text, FONT))) + 16;
    const here = this.x(seconds[at]);
    const left = here + width + 10 > this.box.clientWidth ? here - width - 8 : here + 8;
    this.readout.replaceChildren(
      element("path", {class: "cursor", d: `M${here} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}`}),
      ...this.lines.flatMap((line, k) => (values[k][at] === null ? [] : [element("circle",
        {class: `dot ${line.colour}`, cx: here, cy: this.y(values[k][at]), r: 3.5})])),
      element("rect", {x: left, y: MARGIN.top, width, height: 17 * words.length + 8, rx: 4}),
      ...words.map((text, k) => element("text", {x: left + 8, y: MARGIN.top + 17 * (k + 1)}, text)));
  }
}
