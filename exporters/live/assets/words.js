// Figures as people read them; the same as exporters/live/wording.py writes.
const units = [[1e9, "G"], [1e6, "M"], [1e4, "k"]];
export function count(value) {
  const [size, unit] = units.find(([least]) => value >= least) ?? [1, ""];
  return unit ? `${Number((value / (unit === "k" ? 1e3 : size)).toPrecision(3))} ${unit}` : Math.round(value).toLocaleString("en");
}

export const percent = (ratio) => `${Math.round(ratio * 100)} %`;
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
