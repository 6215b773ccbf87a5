// Helpers: elements, colours, numbers, scales.
// All text is inserted as text nodes. No file parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Set attributes, `style` properties, `on` listeners, and children (nodes or text). */
function element(node, attributes = {}, ...children) {
  const { style = {}, on = {}, ...plain } = attributes;
  for (const [name, value] of Object.entries(plain)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  for (const [name, value] of Object.entries(style)) node.style.setProperty(name, value);
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const h = (tag, ...rest) => element(document.createElement(tag), ...rest);
const s = (tag, ...rest) => element(document.createElementNS(SVG, tag), ...rest);
const $ = (id) => document.getElementById(id);

/** A pair of colours for light and dark as one CSS colour. */
const colour = ([light, dark]) => `light-dark(${light}, ${dark})`;

const percent = (share, digits = 2) => `${(100 * share).toFixed(digits)} %`;
/** Accuracy and deviation on the validation split (prefix "") or the test split ("test_"). */
const accuracyText = (point, prefix = "") => {
  const deviation = point[`${prefix}deviation`];
  return point[`${prefix}accuracy`].toFixed(2) + (deviation === null ? "" : ` ± ${deviation.toFixed(2)}`) + " %";
};
const significant = (value) => String(Number(value.toPrecision(4)));
const grouped = (value) => value.toLocaleString("en-US");
/** Prevent line breaks within "lam = 0.01". */
const noBreak = (text) => text.replaceAll(" = ", "\u00a0=\u00a0");

/** A linear scale from a domain to pixels. */
const linear = ([a, b], [from, to]) => (value) => from + ((value - a) / (b - a || 1)) * (to - from);

/** About `count` round values within [low, high]. */
function niceTicks(low, high, count) {
  const raw = (high - low || 1) / count;
  const decade = 10 ** Math.floor(Math.log10(raw));
  const step = decade * ([1, 2, 2.5, 5, 10].find((factor) => factor * decade >= raw * 0.999));
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) {
    ticks.push(Number((k * step).toPrecision(12)));
  }
  return ticks;
}

/** A domain with a margin around its values, at least `least` wide. */
function padded(values, least) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const span = Math.max(high - low, least);
  const room = (span - (high - low)) / 2 + 0.06 * span;
  return [low - room, high + room];
}

// The sparsity axis: linear, or logarithmic in the non-zero weights. Networks sparser than MOST are
// drawn at its end.
const MOST = 0.9999;
const ZERO_TICKS = {
  log: [0, 50, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99],
  linear: [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100],
};
const onAxis = (kind, sparsity) =>
  kind === "log" ? -Math.log10(1 - Math.min(sparsity, MOST)) : sparsity;

/** Drop labels that overlap the previous one; `width` estimates a label's width. */
function thinned(ticks, width) {
  let end = -Infinity;
  return ticks.filter(({ at, label }) => {
    const half = width(label) / 2 + 4;
    if (at - half < end) return false;
    end = at + half;
    return true;
  });
}
const textWidth = (label) => 7 * label.length;
