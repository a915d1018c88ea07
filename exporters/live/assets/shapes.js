// Elements, texts that fit, and the patterns that tell classes apart for who can't tell the colours.
const SVG = "http://www.w3.org/2000/svg";
export const NAME = "600 12.5px";
export const FACTS = "11.5px";
export const BADGE = "600 11px";

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();

export function long(words, font) {
  const key = `${font} ${words}`;
  if (!widths.has(key)) {
    if (widths.size > 5000) widths.clear();
    pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
    widths.set(key, pen.measureText(words).width);
  }
  return widths.get(key);
}

/** As many of the words' characters as there is room for; nothing where that would be less than three. */
export function fit(words, font, room) {
  if (room < 24) return "";
  if (long(words, font) <= room) return words;
  const most = Math.floor((words.length * room) / long(words, font)) - 1;
  return most > 3 ? `${words.slice(0, most).trimEnd()}…` : "";
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function html(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Definitions of the patterns, which are drawn over the fill. */
export function patterns() {
  const stripes = (id, size) => element("pattern", {id, width: size, height: size, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"},
    element("path", {d: `M0 0V${size}`, class: "mark"}));
  return element("defs", {},
    stripes("dense", 5), stripes("sparse", 12), stripes("rest", 4),
    element("pattern", {id: "dots", width: 9, height: 9, patternUnits: "userSpaceOnUse"}, element("circle", {cx: 3, cy: 3, r: 1.3, class: "mark-dot"})));
}

/** A class's pattern over a box; `bar` is a line along its top. */
export function patterned(pattern, place) {
  if (pattern === "bar") return element("rect", {...place, height: 3, class: "pattern mark-dot"});
  return element("rect", {...place, class: "pattern", fill: `url(#${pattern})`});
}
