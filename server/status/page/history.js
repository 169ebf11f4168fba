// What the service remembers of a job's steps (JobHistory in diagnostics.proto): entries of one step, or of several where
// it was thinned, and numbers of each in columns.
import { ask } from "./service.js";
import { finite } from "./text.js";

const ENTRIES = 400; // As many as a chart has room for.
const SETTLED_MS = 15000; // Steps that are over change only as they are thinned.
const JOINED_MS = 3000; // Where an entry is of several steps, the next step moves little.

export class History {
  constructor({ entries, columns, skips } = { entries: [], columns: [], skips: [] }) {
    this.first = entries.map((entry) => entry.first_step);
    this.last = entries.map((entry) => entry.last_step);
    this.middle = this.first.map((first, i) => (first + this.last[i]) / 2);
    this.skipped = entries.map((entry) => entry.skipped_steps);
    this.slowest = entries.map((entry) => entry.slowest_rank);
    this.columns = columns.map(({ name, source, min, mean, max, non_finite: nonFinite }) => ({
      name, source, min: min.map(finite), mean: mean.map(finite), max: max.map(finite), nonFinite,
    }));
    this.skips = skips;
  }
  get length() {
    return this.first.length;
  }
  of(source) {
    return this.columns.filter((column) => column.source === source);
  }
  column(name, source = "FROM_SERVICE") {
    return this.columns.find((column) => column.name === name && column.source === source) ??
      { name, source, min: [], mean: [], max: [], nonFinite: [] };
  }
  stepsOf(i) {
    const text = (step) => step.toLocaleString("en-US");
    return this.first[i] === this.last[i] ? `step ${text(this.first[i])}` : `steps ${text(this.first[i])} to ${text(this.last[i])}`;
  }
}

// Which steps are looked at: all, the last so many, or a range; and what the service says of them.
export class Window {
  constructor(job) {
    this.job = job;
    this.history = new History();
    this.show({});
  }

  // {}, {latest: steps} or {first, last}.
  show(range) {
    this.range = range;
    this.asked = 0;
  }

  get whole() {
    return this.range.latest === undefined && this.range.first === undefined;
  }

  // Within what is shown; too small a range becomes a larger one.
  zoom(first, last) {
    const low = Math.max(1, Math.round(Math.min(first, last)));
    this.show({ first: low, last: Math.max(low + 3, Math.round(Math.max(first, last))) });
  }

  async load(committed) {
    const { latest, first, last } = this.range;
    const joined = this.history.last.some((end, i) => end > this.history.first[i]);
    const patience = last !== undefined && last < committed ? SETTLED_MS : joined ? JOINED_MS : 0;
    if (this.asked > 0 && performance.now() - this.asked < patience) return;
    const range = this.range;
    const query = latest !== undefined ? { first: Math.max(1, committed - latest + 1) } : first !== undefined ? { first, last } : {};
    const answer = await ask("/api/history", { job: this.job, entries: ENTRIES, ...query });
    if (range !== this.range) return; // Another one has been chosen meanwhile.
    this.history = new History(answer);
    this.asked = performance.now();
  }
}
