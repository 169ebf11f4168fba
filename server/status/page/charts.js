// Charts of a job's steps as SVG, drawn anew with each answer of the service.
import { axis, element, real, seconds, ticks } from "./text.js";

// All in CSS pixels: a chart is drawn as wide as it is shown, so that its text keeps its size.
const HEIGHT = 180;
const LEFT = 56;
const RIGHT = 8;
const BOTTOM = 20;
const TOP = 8;
const LANE = 12; // Below the curve, for marks.
const DRAG = 6; // Shorter ones are taps.
export const widthOf = (box) => Math.max(240, box.clientWidth || 520);

// `inset`: the first and the last step are as far from the edges. `unit`: of what round values are multiples.
function frame(history, width, low, high, label, inset, lane, unit = 1) {
  const first = history.first[0] ?? 0;
  const last = Math.max(history.last.at(-1) ?? 1, first + 1);
  const x = (step) => LEFT + inset + ((step - first) / (last - first)) * (width - LEFT - RIGHT - 2 * inset);
  const stepAt = (at) => first + ((at - LEFT - inset) / (width - LEFT - RIGHT - 2 * inset)) * (last - first);
  const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM - lane);
  const lines = ticks(low / unit, high / unit, 4).map((value) => value * unit).flatMap((value) => [
    element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    element("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, label(value)),
  ]);
  const marks = ticks(first, last, width / 90)
    .filter((step) => Number.isInteger(step))
    .map((step) => element("text", { x: Math.min(x(step), width - 22), y: HEIGHT - 4, "text-anchor": "middle" }, step.toLocaleString("en-US")));
  return { width, x, y, stepAt, axes: [...lines, ...marks] };
}

// A figure that tells one entry's values: the last one's, or those of the one under the pointer or chosen with the
// arrow keys. Where the pointer drags over steps, or + and - are pressed, `zoom(first, last)` is called; with a double
// click, or 0, `zoom()`.
export class Chart {
  constructor(title, wide, zoom) {
    this.index = null;
    this.zoom = zoom;
    this.output = element("output");
    this.svg = element("svg", { role: "img", tabindex: 0, class: "zooms" });
    this.legend = element("ul", { class: "legend" });
    this.figure = element("figure", { class: wide ? "wide" : null, "data-own": "" },
      element("figcaption", null, element("h3", null, title), this.output), this.svg, this.legend);
    this.title = title;
    this.drawn = null; // What draws it again, when its width has changed.
    new ResizeObserver(() => this.drawn && widthOf(this.figure) !== this.drawing.frame.width && this.drawn()).observe(this.figure);
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointercancel", () => this.drag(null));
    this.svg.addEventListener("pointerleave", () => this.from === undefined && this.choose(null));
    this.svg.addEventListener("dblclick", () => this.zoom());
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // `draw(width)` returns the frame, the marks in it, the legend, and what says an entry's values.
  update(history, draw) {
    this.drawn = () => this.update(history, draw);
    this.history = history;
    const drawing = draw(widthOf(this.figure));
    this.drawing = drawing;
    const { frame: { width, axes }, marks, legend } = drawing;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", HEIGHT);
    this.svg.replaceChildren(...axes, ...marks, ...(this.brush ? [this.brush] : []));
    this.legend.replaceChildren(...(legend ?? []).map(([name, text]) =>
      element("li", null, element("i", { class: name }), text)));
    this.choose(this.index);
  }

  at(event) {
    return event.clientX - this.svg.getBoundingClientRect().left;
  }

  press(event) {
    if (event.button !== 0 || this.history.length < 2) return;
    this.from = this.at(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  point(event) {
    if (this.from !== undefined) this.drag(this.at(event));
    const step = this.drawing.frame.stepAt(this.at(event));
    let best = null;
    this.history.middle.forEach((middle, i) => {
      if (best === null || Math.abs(middle - step) < Math.abs(this.history.middle[best] - step)) best = i;
    });
    this.choose(best);
  }

  // null: nothing is dragged over.
  drag(to) {
    this.brush?.remove();
    this.brush = undefined;
    if (to === null) {
      this.from = undefined;
      return;
    }
    if (Math.abs(to - this.from) < DRAG) return;
    this.brush = element("rect", { class: "brush", x: Math.min(this.from, to), width: Math.abs(to - this.from), y: TOP, height: HEIGHT - TOP - BOTTOM });
    this.svg.append(this.brush);
  }

  release(event) {
    const [from, to] = [this.from, this.at(event)];
    this.drag(null);
    if (from === undefined || Math.abs(to - from) < DRAG) return;
    this.zoom(this.drawing.frame.stepAt(from), this.drawing.frame.stepAt(to));
  }

  key(event) {
    const last = this.history.length - 1;
    if (last < 0) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -last, End: last };
    const zooms = { "+": 0.25, "-": 1 };
    if (event.key === "0") this.zoom();
    else if (event.key in zooms) {
      const half = (this.history.last[last] - this.history.first[0]) * zooms[event.key];
      const middle = this.history.middle[this.index ?? last];
      this.zoom(middle - half, middle + half);
    } else if (event.key in moves) {
      this.choose(Math.max(0, Math.min(last, (this.index ?? last) + moves[event.key])));
    } else return;
    event.preventDefault();
  }

  choose(index) {
    this.index = index === null ? null : Math.min(index, this.history.length - 1);
    this.svg.querySelector(".cursor")?.remove();
    const shown = this.index ?? this.history.length - 1;
    const text = shown < 0 ? "no step yet" : `${this.history.stepsOf(shown)}: ${this.drawing.say(shown)}`;
    this.output.textContent = text;
    this.svg.setAttribute("aria-label", `${this.title}; ${text}. Arrow keys choose a step, + and - zoom.`);
    if (this.index === null || shown < 0) return;
    const x = this.drawing.frame.x(this.history.middle[shown]);
    this.svg.append(element("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
  }
}

function path(points) {
  let text = "";
  let pen = false;
  for (const [x, y] of points) {
    if (y === null) {
      pen = false;
      continue;
    }
    text += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = true;
  }
  return text;
}

// From the least to the largest value of each entry; an area for each row of entries that have values.
function band(xs, low, high) {
  let text = "";
  for (let i = 0; i < xs.length; ) {
    if (low[i] === null) {
      ++i;
      continue;
    }
    const from = i;
    while (i < xs.length && low[i] !== null) ++i;
    const there = [];
    const back = [];
    for (let k = from; k < i; ++k) {
      there.push(`${xs[k].toFixed(1)} ${high[k].toFixed(1)}`);
      back.unshift(`${xs[k].toFixed(1)} ${low[k].toFixed(1)}`);
    }
    text += `M${[...there, ...back].join("L")}Z`;
  }
  return text;
}

// What an entry says of a column: its value, or its mean and extremes; how many values were not finite.
export function sayOf(column, i, write = real) {
  const bad = column.nonFinite[i] ?? 0;
  if (column.mean[i] === null || column.mean[i] === undefined) return bad ? "not finite" : "none";
  const range = column.min[i] === column.max[i] ? "" : ` (${write(column.min[i])} to ${write(column.max[i])})`;
  return write(column.mean[i]) + range + (bad ? `, ${bad} not finite` : "");
}

const LINES = ["curve", "line2", "line3", "line4", "line5", "line6"];

// Columns as lines, over the band between their extremes. Entries with skipped or clipped steps, or with values that
// are not finite, are marked below. words: of each column, if there are several.
export function drawLines(history, columns, width, { low, limit, mark, write = real, label = axis, unit = () => 1, outcome = () => "", words }) {
  const values = columns.flatMap((column) => [...column.min, ...column.max]).filter((value) => value !== null);
  const top = Math.max(...values, limit ?? -Infinity, low ?? -Infinity);
  const bottom = low ?? Math.min(...values, top);
  const pad = (top - bottom || Math.abs(top) || 1) * 0.06;
  const lines = frame(history, width, low ?? bottom - pad, values.length ? top + pad : 1, label, 4, LANE, unit(top));
  const xs = history.middle.map(lines.x);
  const heights = (list) => list.map((value) => (value === null ? null : lines.y(value)));
  const marks = [];
  if (limit && lines.y(limit) < HEIGHT - BOTTOM - LANE + 1) marks.push(element("line", { class: "limit", x1: LEFT, x2: width - RIGHT, y1: lines.y(limit), y2: lines.y(limit) }));
  columns.forEach((column, number) => {
    const name = LINES[number % LINES.length];
    if (column.min.some((value, i) => value !== column.max[i])) {
      marks.push(element("path", { class: `band ${name}`, d: band(xs, heights(column.min), heights(column.max)) }));
    }
    const ys = heights(column.mean);
    marks.push(element("path", { class: `stroke ${name}`, d: path(xs.map((x, i) => [x, ys[i] ?? null])) }));
    ys.forEach((y, i) => { // A line needs two points.
      if (y === null || (ys[i - 1] ?? null) !== null || (ys[i + 1] ?? null) !== null) return;
      marks.push(element("circle", { class: `dot ${name}`, r: 2.2, cx: xs[i], cy: y }));
    });
  });
  const names = new Set();
  for (let i = 0; i < history.length; ++i) {
    const name = columns.some((column) => column.nonFinite[i] > 0) ? "non-finite" : mark?.(i) ?? null;
    if (name === null) continue;
    names.add(name);
    marks.push(element("circle", { class: name, r: 2.2, cx: xs[i], cy: HEIGHT - BOTTOM - 3 }));
  }
  const legend = words ? words.map((text, number) => [`key ${LINES[number % LINES.length]}`, text]) : [];
  const say = (i) => (columns.length === 1 ? sayOf(columns[0], i, write)
    : columns.map((column, number) => `${words[number]} ${sayOf(column, i, write)}`).join(", ")) + outcome(i);
  const readable = { "non-finite": "not finite" };
  return { frame: lines, marks, say, legend: [...legend, ...[...names].map((name) => [name, readable[name] ?? name])] };
}

// Parts of steps, on top of each other: [class, column, words]. Of several steps their mean.
export function drawParts(history, parts, width, more = () => "") {
  const at = (column, i) => column.mean[i] ?? 0;
  const totals = history.first.map((_, i) => parts.reduce((sum, [, column]) => sum + at(column, i), 0));
  const n = history.length;
  const steps = n ? history.last[n - 1] - history.first[0] + 1 : 1;
  const bar = Math.min(34, (width - LEFT - RIGHT) / steps);
  const lines = frame(history, width, 0, Math.max(...totals, 1e-6) * 1.05, (value) => (value ? seconds(value) : "0"), bar / 2, 0);
  const marks = [];
  const gap = bar > 4 ? bar * 0.08 : 0;
  let below = new Array(n).fill(0);
  for (const [name, column] of parts) {
    let d = "";
    const above = below.map((value, i) => value + at(column, i));
    for (let i = 0; i < n; ++i) {
      const [left, right] = [lines.x(history.first[i]) - bar / 2 + gap, lines.x(history.last[i]) + bar / 2 - gap];
      const [y0, y1] = [lines.y(below[i]), lines.y(above[i])];
      d += `M${left.toFixed(1)} ${y0.toFixed(1)}H${right.toFixed(1)}V${y1.toFixed(1)}H${left.toFixed(1)}Z`;
    }
    marks.push(element("path", { class: name, d }));
    below = above;
  }
  const say = (i) => `${seconds(totals[i])}: ` + parts.map(([, column, , word]) => `${word} ${seconds(at(column, i))}`).join(", ") + more(i);
  return { frame: lines, marks, say, legend: parts.map(([name, , words]) => [name, words]) };
}

export function spark(values) {
  const finite = values.filter((value) => value !== null);
  const high = Math.max(...finite);
  const low = Math.min(...finite);
  const x = (i) => (i / Math.max(values.length - 1, 1)) * 100;
  const y = (value) => 22 - ((value - low) / (high - low || 1)) * 18;
  return element("svg", { class: "spark", viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" },
    element("path", { class: "stroke curve", d: path(values.map((value, i) => [x(i), value === null ? null : y(value)])) }));
}

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => `10${[...String(exponent)].map((digit) => SUPERSCRIPT[digit]).join("")}`;

// How many elements have which magnitude, by decade.
export function histogram(counts, firstDecade, box) {
  const [width, height] = [widthOf(box), 120];
  const most = Math.max(...counts, 1);
  const each = width / counts.length;
  const bars = counts.map((value, i) => {
    const tall = value === 0 ? 0 : Math.max(1.5, (value / most) * (height - 34));
    return element("rect", { class: "bars", x: i * each + 1.5, width: each - 3, y: height - 18 - tall, height: tall, rx: 1.5 },
      element("title", null, `${power(firstDecade + i)} to ${power(firstDecade + i + 1)}: ${value}`));
  });
  const labels = counts.map((_, i) => (i % (width < 420 ? 3 : 2) === 0 ? element("text", { x: i * each + 1.5, y: height - 4 }, power(firstDecade + i)) : null));
  return element("svg", { width, height, role: "img",
    "aria-label": "Elements by magnitude: " + counts.map((value, i) => (value ? `${value} from ${power(firstDecade + i)}` : null)).filter(Boolean).join(", ") },
    element("line", { class: "grid", x1: 0, x2: width, y1: height - 18, y2: height - 18 }), ...bars, ...labels.filter(Boolean));
}
