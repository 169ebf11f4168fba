// What both views share: asking the service, and what its answers mean.
import { bytes, element, phases, plural, seconds } from "./text.js";

const PATIENCE_MS = 6000;
const MOST_AWAITED = 16; // That are named.

// A service with tokens takes one of a viewer. It comes after a # in the page's address, or is asked for; this tab
// keeps it, and it goes to the service alone, in a header.
const TOKEN = "ballast-token";
const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.has("token")) {
  keepToken(fragment.get("token"));
  history.replaceState(null, "", location.pathname + location.search);
}
export function keepToken(token) {
  sessionStorage.setItem(TOKEN, token.trim());
}
export function hasToken() {
  return Boolean(sessionStorage.getItem(TOKEN));
}

export async function ask(path, query = {}, patience = PATIENCE_MS) {
  const text = new URLSearchParams(query).toString();
  const headers = hasToken() ? { Authorization: `Bearer ${sessionStorage.getItem(TOKEN)}` } : {};
  const response = await fetch(text ? `${path}?${text}` : path, { headers, signal: AbortSignal.timeout(patience) });
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error), { code: response.status });
  return answer;
}

// How fast a number rises, over the last ten seconds.
class Rate {
  constructor() {
    this.samples = [];
  }
  add(value) {
    const now = performance.now() / 1000;
    if (this.samples.length && value < this.samples.at(-1)[1]) this.samples = [];
    this.samples.push([now, value]);
    while (this.samples.length > 2 && now - this.samples[0][0] > 10) this.samples.shift();
    const [[begin, low], [end, high]] = [this.samples[0], this.samples.at(-1)];
    return end - begin < 0.9 ? null : (high - low) / (end - begin);
  }
}
const rates = new Map();
export function rate(name, value) {
  if (!rates.has(name)) rates.set(name, new Rate());
  return rates.get(name).add(value);
}
export function perSecond(value) {
  if (value === null) return "…";
  return value === 0 ? "0/s" : value >= 1 ? `${value.toPrecision(3)}/s` : `${(value * 60).toPrecision(3)}/min`;
}

// Whether others, which have sealed the step, wait for this rank.
export function isAwaited(rank, job) {
  if (job.phase === "DIRECTIONS") return job.seconds_since_first_seal > 0 && rank.orthogonalizes;
  return job.seconds_since_first_seal > 0 && !(job.phase === "VOTING" ? rank.voted : rank.sealed);
}

// Of the last step; null: there is none, or it is not known.
export function lastSeconds(job) {
  return job.recent_steps.at(-1)?.seconds || null;
}

// Ranks wait for others in every step; longer than a step or two takes is worth saying.
export function overdue(job) {
  return job.ranks.some((rank) => isAwaited(rank, job)) && job.seconds_since_first_seal > Math.max(1, 2 * lastSeconds(job));
}

// Its training is over, or was stopped: no rank is there, and no step waits for one.
function idle(job) {
  return job.phase === "READY" && job.attached_ranks === 0;
}

export function stateOf(job) {
  if (overdue(job)) return ["waiting", "wait"];
  if (idle(job)) return ["idle", ""];
  return phases[job.phase] ?? [job.phase, ""];
}

// What a person should know first: [text, class], or null.
export function trouble(job) {
  if (job.problem) return [job.problem, "bad"];
  if (job.waits_for) return [`Step ${job.committed_step + 1} waits: ${job.waits_for}.`, "wait"];
  if (overdue(job)) {
    const awaited = job.ranks.filter((rank) => isAwaited(rank, job)).map(({ rank }) => rank);
    const names = awaited.slice(0, MOST_AWAITED).join(", ") + (awaited.length > MOST_AWAITED ? " and others" : "");
    const one = awaited.length === 1;
    return [`${one ? "Rank" : "Ranks"} ${names} ${one ? "has" : "have"} not ${job.phase === "VOTING" ? "voted on" : "sealed"} step ${job.committed_step + 1}; ` +
      `others have waited for ${seconds(job.seconds_since_first_seal)}.`, "wait"];
  }
  if (job.seconds_open > 30) return [`The step in progress is open for ${seconds(job.seconds_open)}, and no rank has sealed it.`, "wait"];
  const makes = job.saves.find((save) => save.makes_memory);
  if (makes) return [`Steps wait until there is memory for second versions, for the save to ${makes.directory}.`, "wait"];
  const held = job.saves.find((save) => save.holds_back_decisions);
  if (held) return [`Steps wait for the save to ${held.directory}: memory had no room for second versions.`, "wait"];
  const hung = job.saves.find((save) => save.seconds_since_progress > 10);
  if (hung) return [`The save to ${hung.directory} has got no further for ${seconds(hung.seconds_since_progress)}.`, "wait"];
  if (job.phase === "AWAITING_WEIGHTS") return ["First weights have not all arrived.", "wait"];
  if (job.phase !== "CLOSED" && job.attached_ranks < job.home_ranks && !idle(job)) {
    return [`${plural(job.home_ranks - job.attached_ranks, "rank has", "ranks have")} no process.`, "wait"];
  }
  return null;
}

const DOING = { MAKING_MEMORY: "making its memory", TAKING_FIRST_WEIGHTS: "taking first weights",
  MAKING_SECOND_VERSIONS: "making memory for second versions", WRITING_CHECKPOINT: "writing a checkpoint",
  VERIFYING_CHECKPOINT: "verifying a checkpoint", LOADING_CHECKPOINT: "loading a checkpoint" };

// "loading a checkpoint of /saved/gpt: 3.1 GiB of 5.2 GiB, 210 MiB/s, 10 s left".
function line({ kind, directory, done_bytes: done, total_bytes: total, seconds: passed, seconds_since_progress: stopped }) {
  const where = directory ? ` ${kind === "LOADING_CHECKPOINT" ? "of" : "in"} ${directory}` : "";
  const text = `${DOING[kind] ?? "at work"}${where}: ${bytes(done)}${total > 0 ? ` of ${bytes(total)}` : ""}`;
  if (stopped > 10) return `${text}, and nothing more for ${seconds(stopped)}`;
  if (passed < 1 || done === 0) return text;
  return `${text}, ${bytes(done / passed)}/s` + (total > done ? `, ${seconds(((total - done) * passed) / done)} left` : "");
}

// Long work that is under way, a line and a bar each; null if there is none.
export function work(activities, name = () => "") {
  if (activities.length === 0) return null;
  return element("ul", { class: "card work", "aria-label": "Under way" }, activities.map((activity) =>
    element("li", null, name(activity) ? element("strong", null, `${name(activity)} `) : null, line(activity), " ",
      activity.total_bytes > 0 ? element("span", { class: "bar" }, element("i", { "width%": Math.min(100, (100 * activity.done_bytes) / activity.total_bytes) })) : null)));
}

export function fact(label, value, more) {
  return element("div", null, element("dt", null, label), element("dd", null, value), more);
}

export function meter(part, whole) {
  return element("div", { class: "meter" }, element("i", { "width%": whole > 0 ? Math.min(100, (100 * part) / whole) : 0 }));
}
