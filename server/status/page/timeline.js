// The timeline of a step on the threads of the service, of which a part can be looked at.
import { widthOf } from "./charts.js";
import { ask } from "./service.js";
import { card, count, element, plural, seconds, ticks } from "./text.js";

const KINDS = { ARRIVED: "gathering", SUMMED: "deciding", SPECULATED: "awaiting", DECIDED: "deciding", UPDATED: "updating", SENT: "sending" };
const WORDS = { ARRIVED: "arriving", SUMMED: "summing squares", SPECULATED: "updating before the decision", DECIDED: "deciding", UPDATED: "updating", SENT: "sending weights" };
const TOP = 8;
const ROW = 18;
const LEFT = 66;
const RIGHT = 10;
const DRAG = 6; // Shorter ones are taps.
const SHORTEST = 20; // Microseconds, of what is looked at.
const MOST_TITLES = 3000;

// Events are [kind, thread, chunk, begin, end] in microseconds; those within [from, to] are drawn.
function draw(events, width, [from, to]) {
  const threads = [...new Set(events.filter((event) => event[2] >= 0).map((event) => event[1]))].sort((a, b) => a - b);
  const height = TOP + Math.max(threads.length, 1) * ROW + 26;
  const x = (time) => LEFT + ((Math.max(from, Math.min(to, time)) - from) / (to - from)) * (width - LEFT - RIGHT);
  const marks = [];
  threads.forEach((thread, i) => {
    marks.push(element("text", { x: LEFT - 7, y: TOP + i * ROW + 13, "text-anchor": "end" }, `thread ${thread}`));
    marks.push(element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: TOP + (i + 1) * ROW, y2: TOP + (i + 1) * ROW }));
  });
  const seen = events.filter((event) => event[4] >= from && event[3] <= to).sort((a, b) => a[3] - b[3]);
  // Neighbours that are nearer than a third of a point become one.
  const last = new Map();
  for (const [kind, thread, chunk, begin, end] of seen) {
    if (chunk < 0) continue;
    const key = `${kind} ${thread}`;
    const before = last.get(key);
    if (before && x(begin) - before.right < 0.35) {
      before.right = Math.max(before.right, x(end));
      before.rect.setAttribute("width", Math.max(1.4, before.right - before.left).toFixed(2));
      before.rect.replaceChildren();
      continue;
    }
    const rect = element("rect", { class: KINDS[kind] ?? "other", x: x(begin).toFixed(2), width: Math.max(1.4, x(end) - x(begin)).toFixed(2),
      y: TOP + threads.indexOf(thread) * ROW + 3, height: ROW - 6, rx: 1 });
    if (seen.length <= MOST_TITLES) rect.append(element("title", null, `chunk ${chunk}, ${WORDS[kind] ?? kind}: ${seconds((end - begin) / 1e6)} from ${seconds(begin / 1e6)}`));
    last.set(key, { rect, left: x(begin), right: x(end) });
    marks.push(rect);
  }
  for (const [kind, , chunk, , end] of seen) {
    if (chunk >= 0 || kind === "BEGUN" || end > to) continue;
    marks.push(element("line", { class: "cursor", x1: x(end), x2: x(end), y1: TOP, y2: height - 20 },
      element("title", null, `${kind.toLowerCase()} at ${seconds(end / 1e6)}`)));
  }
  ticks(from, to, width / 90).forEach((time) =>
    marks.push(element("text", { x: x(time), y: height - 5, "text-anchor": "middle" }, time ? seconds(time / 1e6) : "0")));
  return { marks, height };
}

function busy(events) {
  const sums = {};
  for (const [kind, , chunk, from, to] of events) {
    if (chunk >= 0) sums[kind] = (sums[kind] ?? 0) + (to - from) / 1e6;
  }
  return Object.entries(sums).map(([kind, time]) => [KINDS[kind] ?? "other", `${WORDS[kind] ?? kind} ${seconds(time)}`]);
}

export class Timeline {
  constructor(name) {
    this.job = name;
    this.button = element("button", { type: "button", class: "main", click: () => this.record() }, "Record the next step");
    this.text = element("span", { class: "quiet small", role: "status" }, "Shows what each thread of the service does, chunk by chunk.");
    const tool = (words, does) => element("button", { type: "button", click: does }, words);
    this.zooms = element("div", { class: "tools", hidden: true },
      tool("Zoom in", () => this.scale(0.5)), tool("Zoom out", () => this.scale(2)), tool("Earlier", () => this.move(-0.5)),
      tool("Later", () => this.move(0.5)), tool("Whole step", () => this.look(0, this.end)), this.where = element("span", { class: "quiet small" }));
    this.svg = element("svg", { role: "img", tabindex: 0, class: "zooms" });
    this.figure = element("figure", { class: "scroll" });
    this.legend = element("ul", { class: "legend" });
    this.section = card("timeline", "Timeline of a step", null, element("div", { class: "tools" }, this.button, this.text), this.zooms, this.figure, this.legend);
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.svg.addEventListener("pointermove", (event) => this.drag(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointercancel", () => this.drop());
    this.svg.addEventListener("dblclick", () => this.look(0, this.end));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.events && this.width() !== this.drawn && this.look(...this.range)).observe(this.section);
  }

  async record() {
    this.button.disabled = true;
    this.text.textContent = "Waiting for a step to begin and end …";
    try {
      const answer = await ask("/api/timeline", { job: this.job, patience: 60 }, 70000);
      if (answer.unavailable) throw new Error(answer.unavailable);
      const origin = answer.events[0].begin_ns;
      const micro = (ns) => Math.trunc((ns - origin) / 1000);
      this.events = answer.events.map((event) => [event.kind, event.thread, event.chunk, micro(event.begin_ns), micro(event.end_ns)]);
      this.end = Math.max(...this.events.map((event) => event[4]), 1);
      this.figure.replaceChildren(this.svg);
      this.zooms.hidden = false;
      this.look(0, this.end);
      this.legend.replaceChildren(...busy(this.events).map(([name, text]) => element("li", null, element("i", { class: name }), text)));
      this.text.textContent = `Step ${count(answer.events[0].step)}, ${plural(this.events.length, "event", "events")}` +
        (answer.dropped_events ? `; ${count(answer.dropped_events)} more are left out, ballast trace has them` : "");
    } catch (error) {
      this.text.textContent = error.message;
    }
    this.button.disabled = false;
  }

  width() {
    return Math.max(320, widthOf(this.figure) - 2 * parseFloat(getComputedStyle(this.figure).paddingLeft || 0));
  }

  // Within the step, and not too little of it.
  look(from, to) {
    const length = Math.min(this.end, Math.max(SHORTEST, to - from));
    const begin = Math.max(0, Math.min(from, this.end - length));
    this.range = [begin, begin + length];
    this.drawn = this.width();
    const { marks, height } = draw(this.events, this.drawn, this.range);
    this.svg.setAttribute("width", this.drawn);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren(...marks);
    const text = length < this.end ? `From ${seconds(begin / 1e6)} to ${seconds((begin + length) / 1e6)}` : "The whole step";
    this.where.textContent = `${text}. Drag over a part to zoom.`;
    this.svg.setAttribute("aria-label", `The step on the threads of the service. ${text}. + and - zoom, arrow keys move.`);
  }

  scale(factor) {
    const [from, to] = this.range;
    const [middle, half] = [(from + to) / 2, ((to - from) / 2) * factor];
    this.look(middle - half, middle + half);
  }

  move(part) {
    const [from, to] = this.range;
    this.look(from + part * (to - from), to + part * (to - from));
  }

  key(event) {
    const does = { "+": () => this.scale(0.5), "-": () => this.scale(2), ArrowLeft: () => this.move(-0.25),
      ArrowRight: () => this.move(0.25), 0: () => this.look(0, this.end) }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }

  at(event) {
    return event.clientX - this.svg.getBoundingClientRect().left;
  }

  press(event) {
    if (event.button !== 0) return;
    this.from = this.at(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  drag(event) {
    if (this.from === undefined) return;
    const to = this.at(event);
    this.brush?.remove();
    this.brush = element("rect", { class: "brush", x: Math.min(this.from, to), width: Math.abs(to - this.from), y: TOP,
      height: Number(this.svg.getAttribute("height")) - TOP - 20 });
    this.svg.append(this.brush);
  }

  drop() {
    this.brush?.remove();
    this.from = undefined;
  }

  release(event) {
    const [from, to] = [this.from, this.at(event)];
    this.drop();
    if (from === undefined || Math.abs(to - from) < DRAG) return;
    const [begin, end] = this.range;
    const time = (at) => begin + ((at - LEFT) / (this.drawn - LEFT - RIGHT)) * (end - begin);
    this.look(time(Math.min(from, to)), time(Math.max(from, to)));
  }
}
