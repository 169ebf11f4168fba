// Charts as SVG, drawn anew with each answer of the service.
import { element, real, seconds } from "./text.js";

// All in CSS pixels: a chart is drawn as wide as it is shown, so that its text keeps its size.
const HEIGHT = 180;
const LEFT = 56;
const RIGHT = 8;
const BOTTOM = 20;
const TOP = 8;
const LANE = 12; // Below the curve, for marks.
const widthOf = (box) => Math.max(240, box.clientWidth || 520);

// Values at which an axis is labelled: at most about `most`, round, within [low, high].
function ticks(low, high, most) {
  const rough = (high - low) / most;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) values.push(value);
  return values;
}

// `inset`: the first and the last step are as far from the edges.
function frame(steps, width, low, high, label, inset, lane) {
  const first = steps[0] ?? 0;
  const last = Math.max(steps[steps.length - 1] ?? 1, first + 1);
  const x = (step) => LEFT + inset + ((step - first) / (last - first)) * (width - LEFT - RIGHT - 2 * inset);
  const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM - lane);
  const lines = ticks(low, high, 4).flatMap((value) => [
    element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    element("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, label(value)),
  ]);
  const marks = ticks(first, last, width / 90)
    .filter((step) => Number.isInteger(step))
    .map((step) => element("text", { x: x(step), y: HEIGHT - 4, "text-anchor": "middle" }, String(step)));
  return { width, x, y, axes: [...lines, ...marks] };
}

// A figure that tells one step's values: the last one's, or those of the one under the pointer or chosen with
// the arrow keys.
export class Chart {
  constructor(title, wide) {
    this.wide = wide;
    this.index = null;
    this.output = element("output");
    this.svg = element("svg", { role: "img", tabindex: 0 });
    this.legend = element("ul", { class: "legend" });
    this.figure = element("figure", { class: wide ? "wide" : null, "data-own": "" },
      element("figcaption", null, element("h3", null, title), this.output), this.svg, this.legend);
    this.title = title;
    this.drawn = null; // What draws it again, when its width has changed.
    new ResizeObserver(() => this.drawn && widthOf(this.figure) !== this.drawing.frame.width && this.drawn()).observe(this.figure);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // `draw(width)` returns the frame, the marks in it, the legend, and what says a step's values.
  update(history, draw) {
    this.drawn = () => this.update(history, draw);
    this.history = history;
    const drawing = draw(widthOf(this.figure));
    this.drawing = drawing;
    const { frame: { width, axes }, marks, legend } = drawing;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", HEIGHT);
    this.svg.replaceChildren(...axes, ...marks);
    this.legend.replaceChildren(...(legend ?? []).map(([name, text]) =>
      element("li", null, element("i", { class: name }), text)));
    this.choose(this.index);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * this.drawing.frame.width;
    const { x } = this.drawing.frame;
    let best = null;
    this.history.step.forEach((step, i) => {
      if (best === null || Math.abs(x(step) - at) < Math.abs(x(this.history.step[best]) - at)) best = i;
    });
    this.choose(best);
  }

  key(event) {
    const last = this.history.step.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -last, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, (this.index ?? last) + moves[event.key])));
  }

  choose(index) {
    this.index = index;
    this.svg.querySelector(".cursor")?.remove();
    const shown = index ?? this.history.step.length - 1;
    const text = shown < 0 ? "no step yet" : `step ${this.history.step[shown]}: ${this.drawing.say(shown)}`;
    this.output.textContent = text;
    this.svg.setAttribute("aria-label", `${this.title}; ${text}. Arrow keys choose a step.`);
    if (index === null || shown < 0) return;
    const x = this.drawing.frame.x(this.history.step[shown]);
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

// A line of values, null where there is none. Skipped steps and clipped ones are marked below it.
export function drawLine(history, values, width, { low, limit, mark, say }) {
  const finite = values.filter((value) => value !== null);
  const top = Math.max(...finite, limit ?? 0, low ?? 0);
  const bottom = low ?? Math.min(...finite, top);
  const pad = (top - bottom || Math.abs(top) || 1) * 0.06;
  const lines = frame(history.step, width, low ?? bottom - pad, finite.length ? top + pad : 1, real, 4, LANE);
  const marks = [];
  if (limit && lines.y(limit) < HEIGHT - BOTTOM - LANE + 1) marks.push(element("line", { class: "limit", x1: LEFT, x2: lines.width - RIGHT, y1: lines.y(limit), y2: lines.y(limit) }));
  marks.push(element("path", { class: "curve",
    d: path(history.step.map((step, i) => [lines.x(step), values[i] === null ? null : lines.y(values[i])])) }));
  if (history.step.length === 1 && values[0] !== null) {
    marks.push(element("circle", { class: "bars", r: 2.5, cx: lines.x(history.step[0]), cy: lines.y(values[0]) }));
  }
  const names = new Set();
  history.step.forEach((step, i) => {
    const name = mark(i);
    if (name === null) return;
    names.add(name);
    marks.push(element("circle", { class: name, r: 2.2, cx: lines.x(step), cy: HEIGHT - BOTTOM - 3 }));
  });
  return { frame: lines, marks, say, legend: [...names].map((name) => [name, name]) };
}

const PARTS = ["gathering", "awaiting", "deciding", "updating"];

// The parts of steps, on top of each other.
export function drawParts(history, width) {
  const totals = history.step.map((_, i) => PARTS.reduce((sum, part) => sum + history[part][i], 0));
  const n = history.step.length;
  const bar = Math.min(34, (width - LEFT - RIGHT) / Math.max(n, 1));
  const lines = frame(history.step, width, 0, Math.max(...totals, 1e-6) * 1.05, (value) => (value ? seconds(value) : "0"), bar / 2, 0);
  const marks = [];
  let below = new Array(n).fill(0);
  for (const part of PARTS) {
    let d = "";
    const above = below.map((value, i) => value + history[part][i]);
    for (let i = 0; i < n; ++i) {
      const x = lines.x(history.step[i]) - bar * 0.42;
      const [y0, y1] = [lines.y(below[i]), lines.y(above[i])];
      d += `M${x.toFixed(1)} ${y0.toFixed(1)}H${(x + bar * 0.84).toFixed(1)}V${y1.toFixed(1)}H${x.toFixed(1)}Z`;
    }
    marks.push(element("path", { class: part, d }));
    below = above;
  }
  const say = (i) => `${seconds(totals[i])}: ` + PARTS.map((part) => `${part} ${seconds(history[part][i])}`).join(", ");
  const words = { gathering: "gathering gradients", awaiting: "awaiting the last rank", deciding: "deciding", updating: "updating" };
  return { frame: lines, marks, say, legend: PARTS.map((part) => [part, words[part]]) };
}

export function spark(values) {
  const finite = values.filter((value) => value !== null);
  const high = Math.max(...finite);
  const low = Math.min(...finite);
  const x = (i) => (i / Math.max(values.length - 1, 1)) * 100;
  const y = (value) => 22 - ((value - low) / (high - low || 1)) * 18;
  return element("svg", { class: "spark", viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" },
    element("path", { class: "curve", d: path(values.map((value, i) => [x(i), value === null ? null : y(value)])) }));
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

const KINDS = { arrived: "gathering", summed: "deciding", speculated: "awaiting", decided: "deciding", updated: "updating", sent: "sending" };
export const KIND_WORDS = { arrived: "arriving", summed: "summing squares", speculated: "updating before the decision", decided: "deciding", updated: "updating", sent: "sending weights" };

// One step on the threads of the service. Events are [kind, thread, chunk, begin, end] in microseconds.
export function timeline(events, box) {
  const threads = [...new Set(events.filter((event) => event[2] >= 0).map((event) => event[1]))].sort((a, b) => a - b);
  const end = Math.max(...events.map((event) => event[4]), 1);
  const [width, row, left] = [Math.max(620, widthOf(box)), 18, 66];
  const height = TOP + Math.max(threads.length, 1) * row + 26;
  const x = (time) => left + (time / end) * (width - left - 10);
  const marks = [];
  threads.forEach((thread, i) => {
    marks.push(element("text", { x: left - 7, y: TOP + i * row + 13, "text-anchor": "end" }, `thread ${thread}`));
    marks.push(element("line", { class: "grid", x1: left, x2: width - 10, y1: TOP + (i + 1) * row, y2: TOP + (i + 1) * row }));
  });
  // Neighbours that are nearer than a third of a point become one.
  const last = new Map();
  for (const [kind, thread, chunk, from, to] of [...events].sort((a, b) => a[3] - b[3])) {
    if (chunk < 0) continue;
    const key = `${kind} ${thread}`;
    const before = last.get(key);
    if (before && x(from) - before.right < 0.35) {
      before.right = Math.max(before.right, x(to));
      before.rect.setAttribute("width", Math.max(1.4, before.right - before.left).toFixed(2));
      continue;
    }
    const rect = element("rect", { class: KINDS[kind] ?? "other", x: x(from).toFixed(2), width: Math.max(1.4, x(to) - x(from)).toFixed(2),
      y: TOP + threads.indexOf(thread) * row + 3, height: row - 6, rx: 1 });
    last.set(key, { rect, left: x(from), right: x(to) });
    marks.push(rect);
  }
  for (const [kind, , chunk, from, to] of events) {
    if (chunk >= 0 || kind === "begun") continue;
    marks.push(element("line", { class: "cursor", x1: x(to), x2: x(to), y1: TOP, y2: height - 20 },
      element("title", null, `${kind} at ${seconds(to / 1e6)}`)));
  }
  ticks(0, end, 8).forEach((time) =>
    marks.push(element("text", { x: x(time), y: height - 5, "text-anchor": "middle" }, time ? seconds(time / 1e6) : "0")));
  return element("svg", { width, height, role: "img", "aria-label": "The step on the threads of the service" }, ...marks);
}

export function busy(events) {
  const sums = {};
  for (const [kind, , chunk, from, to] of events) {
    if (chunk >= 0) sums[kind] = (sums[kind] ?? 0) + (to - from) / 1e6;
  }
  return Object.entries(sums).map(([kind, time]) => [KINDS[kind] ?? "other", `${KIND_WORDS[kind] ?? kind} ${seconds(time)}`]);
}
