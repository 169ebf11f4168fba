// A job's steps: charts of what the service and the trainer know of them, over one range of steps.
import { Chart, drawLines, drawParts } from "./charts.js";
import { Window } from "./history.js";
import { bytes, card, count, element, morph, real, unitOf } from "./text.js";

const RANGES = [["Whole run", {}], ["Last 1,000", { latest: 1000 }], ["Last 100", { latest: 100 }]];
const SERVICE_PARTS = [["gathering", "gathering_seconds", "gathering gradients"], ["awaiting", "awaiting_seconds", "awaiting the last rank"],
  ["deciding", "deciding_seconds", "deciding"], ["updating", "updating_seconds", "updating"]];
const RANK_PARTS = [["other", "compute", "computing"], ["awaiting", "reduce", "waiting for collectives"],
  ["gathering", "send", "giving gradients"], ["updating", "wait", "waiting for the decision and the weights"]];
// What a trainer gives first is looked at first.
const order = (column) => ["loss", "tokens_per_second"].indexOf(column.name) + 1 || 9;

// That the last step's gradient was clipped to; 0: it was not.
export const maxNorm = (job) => job.recent_steps.at(-1)?.voted?.max_norm ?? 0;

export class Steps {
  constructor(job) {
    this.window = new Window(job);
    this.charts = new Map();
    this.figures = element("div", { class: "charts", "data-own": "" });
    this.tools = element("div", { class: "tools ranges", role: "group", "aria-label": "Which steps are shown" });
    this.skipped = element("p", { class: "quiet small" });
    this.section = card("charts", "Steps", null, this.tools, this.skipped, this.figures);
    this.committed = 0;
    this.limit = null;
  }

  get history() {
    return this.window.history;
  }

  show(range) {
    this.window.show(range);
    this.look();
  }

  // Of a chart; without a range all steps are shown.
  zoom(first, last) {
    if (first === undefined) return this.show({});
    this.window.zoom(first, last);
    this.look();
  }

  async look() {
    this.tell();
    try {
      await this.window.load(this.committed);
    } catch {
      return; // The page says that the service does not answer.
    }
    this.draw();
  }

  async update(job) {
    this.committed = job.committed_step;
    this.limit = maxNorm(job) || null;
    await this.window.load(this.committed);
    this.draw();
  }

  // Which range it is.
  tell() {
    const { range, whole } = this.window;
    const same = (other) => (range.first === undefined && range.latest === other.latest);
    const history = this.history;
    const text = history.length ? `Steps ${count(history.first[0])} to ${count(history.last.at(-1))}` : "No step yet";
    const wide = history.last.some((last, i) => last > history.first[i]);
    morph(this.tools, element("div", { class: "tools ranges", role: "group", "aria-label": "Which steps are shown" },
      RANGES.map(([words, other]) => element("button", { type: "button", "aria-pressed": String(same(other)), "data-range": words }, words)),
      element("span", { class: "quiet small" }, text + (wide ? "; lines are means, shades reach from the least to the largest" : ""),
        whole ? ". Drag over a chart to zoom." : ". Double-click for all.")));
    this.tools.onclick = (event) => {
      const chosen = RANGES.find(([words]) => words === event.target.dataset?.range);
      if (chosen) this.show(chosen[1]);
    };
  }

  chart(key, title, wide, draw) {
    let chart = this.charts.get(key);
    if (!chart) {
      chart = new Chart(title, wide, (first, last) => this.zoom(first, last));
      this.charts.set(key, chart);
    }
    this.shown.push(chart.figure);
    return () => chart.update(this.history, draw);
  }

  draw() {
    this.tell();
    const history = this.history;
    const norm = history.column("norm");
    const clip = history.column("clip_coefficient");
    const mark = (i) => (history.skipped[i] > 0 ? "skipped" : clip.min[i] < 1 ? "clipped" : null);
    const steps = (i) => history.last[i] - history.first[i] + 1;
    const outcome = (i) => (history.skipped[i] > 0 ? (steps(i) > 1 ? `, ${history.skipped[i]} skipped` : ", skipped") : clip.min[i] < 1 ? ", clipped" : "");
    this.shown = [];
    const draws = [];
    const lines = (key, title, columns, options = {}, wide = false) =>
      draws.push(this.chart(key, title, wide, (width) => drawLines(history, columns, width, options)));
    const numbers = history.of("FROM_TRAINER").sort((a, b) => order(a) - order(b) || (a.name < b.name ? -1 : 1));
    for (const column of numbers) {
      lines(`number ${column.name}`, column.name.replace(/^loss$/, "Loss").replace(/^tokens_per_second$/, "Tokens a second"), [column],
        column.name === "tokens_per_second" ? { low: 0 } : {});
    }
    lines("norm", "Gradient norm", [norm], { limit: this.limit, mark, outcome });
    // With clipping, nothing else moves a coefficient that matters.
    lines("clip", "Clip coefficient", [clip], { low: 0, mark, outcome });
    const groups = history.of("FROM_GROUP");
    if (groups.length > 1) lines("groups", "Gradient norm by group", groups, { words: groups.map((column) => column.name) });
    lines("lr", "Learning rate", [history.column("lr")], { low: 0 });
    if (history.column("loss_scale").max.some((scale) => scale !== null && scale !== 1)) {
      lines("scale", "Loss scale", [history.column("loss_scale")], { low: 0 });
    }
    const parts = (list, source) => list.map(([name, column, words]) => [name, history.column(column, source), words, column.replace("_seconds", "")]);
    const period = history.column("step_seconds");
    draws.push(this.chart("parts", "Step time and its parts", true, (width) => drawParts(history, parts(SERVICE_PARTS, "FROM_SERVICE"), width,
      (i) => (period.max[i] > 0 && steps(i) > 1 ? `; the longest from commit to commit took ${real(period.max[i])} s` : ""))));
    if (history.slowest.some((rank) => rank >= 0)) {
      draws.push(this.chart("rank", "Where the slowest rank's time goes", true, (width) => drawParts(history, parts(RANK_PARTS, "FROM_RANK"), width,
        (i) => (history.slowest[i] >= 0 ? `; rank ${history.slowest[i]}` : ""))));
    }
    lines("memory", "Memory", [history.column("memory_bytes"), history.column("service_memory_bytes")],
      { low: 0, write: bytes, label: (value) => (value ? bytes(value) : "0"), unit: unitOf, words: ["this job", "all jobs"] }, true);
    // Only when they are in the page does a chart know its width.
    if (this.figures.children.length !== this.shown.length || this.shown.some((figure, i) => this.figures.children[i] !== figure)) {
      this.figures.replaceChildren(...this.shown);
    }
    for (const draw of draws) draw();
    const skip = history.skips.at(-1);
    this.skipped.textContent = skip === undefined ? "" : `Step ${count(skip.step)} was skipped: ${skip.reason}.`;
  }

  // The last step's, for the head of the page: [label, value].
  get facts() {
    const numbers = this.history.of("FROM_TRAINER");
    const last = this.history.length - 1;
    return [["loss", "Loss"], ["tokens_per_second", "Tokens a second"]].flatMap(([name, label]) => {
      const column = numbers.find((one) => one.name === name);
      return column && last >= 0 ? [[label, real(column.mean[last])]] : [];
    });
  }
}
