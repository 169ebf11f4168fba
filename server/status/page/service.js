// What both views share: asking the service, and what its answers mean.
import { element, phases, plural, seconds } from "./text.js";

const PATIENCE_MS = 6000;

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

// Ranks wait for others in every step; longer than a step or two takes is worth saying.
export function overdue(job) {
  return job.awaited.length > 0 && job.seconds_since_first_seal > Math.max(1, 2 * (job.last_step_seconds ?? 0));
}

// Its training is over, or was stopped: no rank is there, and no step waits for one.
function idle(job) {
  return job.phase === "ready" && job.attached === 0;
}

export function stateOf(job) {
  if (overdue(job)) return ["waiting", "wait"];
  if (idle(job)) return ["idle", ""];
  return phases[job.phase] ?? [job.phase, ""];
}

// What a person should know first: [text, class], or null.
export function trouble(job) {
  if (job.problem) return [job.problem, "bad"];
  if (overdue(job)) {
    const names = job.awaited.join(", ") + (job.awaited_ranks > job.awaited.length ? " and others" : "");
    const one = job.awaited_ranks === 1;
    return [`${one ? "Rank" : "Ranks"} ${names} ${one ? "has" : "have"} not ${job.phase === "voting" ? "voted on" : "sealed"} step ${job.committed_step + 1}; ` +
      `others have waited for ${seconds(job.seconds_since_first_seal)}.`, "wait"];
  }
  if (job.seconds_open > 30) return [`The step in progress is open for ${seconds(job.seconds_open)}, and no rank has sealed it.`, "wait"];
  const makes = job.saves.find((save) => save.makes_memory);
  if (makes) return [`Steps wait until there is memory for second versions, for the save to ${makes.directory}.`, "wait"];
  const held = job.saves.find((save) => save.holds_back_decisions);
  if (held) return [`Steps wait for the save to ${held.directory}: memory had no room for second versions.`, "wait"];
  const hung = job.saves.find((save) => save.seconds_since_progress > 10);
  if (hung) return [`The save to ${hung.directory} has got no further for ${seconds(hung.seconds_since_progress)}.`, "wait"];
  if (job.phase === "awaiting_weights") return ["First weights have not all arrived.", "wait"];
  if (job.phase !== "closed" && job.attached < job.world_size && !idle(job)) {
    return [`${plural(job.world_size - job.attached, "rank has", "ranks have")} no process.`, "wait"];
  }
  return null;
}

// Long work that is under way, a line and a bar each; null if there is none.
export function work(activities, name = () => "") {
  if (activities.length === 0) return null;
  return element("ul", { class: "card work", "aria-label": "Under way" }, activities.map((activity) =>
    element("li", null, name(activity) ? element("strong", null, `${name(activity)} `) : null, activity.line, " ",
      activity.total > 0 ? element("span", { class: "bar" }, element("i", { "width%": Math.min(100, (100 * activity.done) / activity.total) })) : null)));
}

export function fact(label, value, more) {
  return element("div", null, element("dt", null, label), element("dd", null, value), more);
}

export function meter(part, whole) {
  return element("div", { class: "meter" }, element("i", { "width%": whole > 0 ? Math.min(100, (100 * part) / whole) : 0 }));
}
