// One job: its ranks, charts, memory, groups, parameters, the timeline of a step, checkpoints.
import { histogram } from "./charts.js";
import { ask, fact, isAwaited, lastSeconds, overdue, perSecond, rate, stateOf, trouble, work } from "./service.js";
import { maxNorm, Steps } from "./steps.js";
import { bare, bytes, card, count, element, morph, plural, real, seconds } from "./text.js";
import { Timeline } from "./timeline.js";

function row(cells, attributes) {
  return element("tr", attributes, cells.map((cell) =>
    Array.isArray(cell) ? element("td", { class: "number" }, ...cell) : element("td", null, cell)));
}

// On a phone a row is a card, in which each cell has its head's words beside it.
function table(heads, rows) {
  for (const one of rows) {
    [...one.children].forEach((cell, i) => cell.setAttribute("data-label", [heads[i]].flat()[0]));
  }
  return element("div", { class: "scroll" }, element("table", null,
    element("thead", null, element("tr", null, heads.map((head) =>
      Array.isArray(head) ? element("th", { scope: "col", class: "number" }, head[0]) : element("th", { scope: "col" }, head)))),
    element("tbody", null, rows)));
}

function rankState(rank, job) {
  if (rank.awaited) return rank.attached ? "awaited" : "awaited; no process has it";
  if (!rank.attached) return "no process";
  if (rank.orthogonalizes) return "orthogonalizing";
  if (rank.sealed) return "sealed";
  if (!rank.begun) return job.phase === "OPEN" ? "has not begun" : "attached";
  return job.phase === "UPDATING" ? "receiving" : "sending gradients";
}

function ranks(job) {
  const late = overdue(job);
  const shown = job.ranks.map((rank) => ({ ...rank, awaited: late && isAwaited(rank, job) }))
    .sort((a, b) => Number(b.awaited) - Number(a.awaited) || a.rank - b.rank);
  const rows = shown.map((rank) => {
    const sent = rank.chunks ? (100 * (rank.begun ? rank.chunks_complete : 0)) / rank.chunks : 0;
    const missing = rank.begun && !rank.sealed ? rank.missing_parameters.slice(0, 3).join(", ") : "";
    return row([
      element("strong", null, `${rank.rank}`),
      element("span", { class: `pill ${rank.awaited ? "wait" : rank.sealed || rank.begun ? "work" : ""}` }, rankState(rank, job)),
      element("span", { class: "mono" }, element("span", { class: "bar" }, element("i", { "width%": sent })),
        rank.begun ? `${rank.chunks_complete}/${rank.chunks}` : `–/${rank.chunks}`),
      [rank.begun ? String(rank.micro_steps_ended) : "–"],
      missing ? element("span", { class: "quiet small" }, missing + (rank.missing_parameters.length > 3 ? " …" : "")) : "",
      rank.shared_memory ? "shared memory" : "stream",
      element("span", { class: "mono quiet" }, rank.process_id || "–"),
    ], { class: rank.awaited ? "awaited" : null, "data-key": rank.rank });
  });
  const hint = `${job.attached_ranks} of ${job.home_ranks} have a process` +
    (job.ranks.length < job.home_ranks ? `; ${job.ranks.length} are shown` : "");
  return card("ranks", "Ranks", hint,
    table(["Rank", "State", "Chunks sent", ["Micro-steps ended"], "Still to come", "Path", "Process"], rows));
}

export function members(job) {
  if (!job.members.length) return null;
  const rows = job.members.map((member, i) => row([
    element("strong", null, member.address),
    [count(job.homes.filter((home) => home === i).length)],
    i === job.homes[0] ? "leads" : "",
    [member.memory_bytes ? bytes(member.memory_bytes) : "–"],
    member.linked ? (i === job.answering_member ? "this service" : "linked")
      : member.problem ? `none for ${seconds(member.seconds_without_link)}: ${member.problem}` : "–",
    [member.round_trip_seconds ? seconds(member.round_trip_seconds) : "–"],
    member.waited_for ? element("span", { class: "pill wait" }, "awaited") : "",
  ], { class: member.waited_for ? "awaited" : null, "data-key": member.address }));
  return card("members", "Members", "services that hold the job together",
    table(["Member", ["Ranks"], "Lead", ["Memory"], "Link", ["Round trip"], "Step"], rows));
}

const MEMORY = [["state_bytes", "weights and moments", "updating"], ["gradient_bytes", "gradients", "gathering"],
  ["accumulator_bytes", "sums over micro-steps", "deciding"], ["speculation_bytes", "second versions", "awaiting"],
  ["previous_bytes", "previous versions", "updating"],
  ["shared_bytes", "shared with workers", "sending"], ["other", "buffers and tables", "other"]];

function memory(job) {
  const all = job.memory.total_bytes + job.memory.shared_bytes;
  const of = { ...job.memory };
  of.other = all - MEMORY.reduce((sum, [kind]) => sum + (of[kind] ?? 0), 0);
  const kinds = MEMORY.filter(([kind]) => of[kind] > 0);
  return card("memory", "Memory", bytes(all), ...[
    element("div", { class: "stack", "aria-hidden": "true" },
      kinds.map(([kind, , name]) => element("i", { class: name, "width%": (100 * of[kind]) / all }))),
    element("ul", { class: "legend" }, kinds.map(([kind, words, name]) =>
      element("li", null, element("i", { class: name }), `${words} ${bytes(of[kind])}`))),
    speculation(job),
  ]);
}

function speculation({ update_mode: mode, speculation: counts }) {
  if (mode !== "SPECULATE") return null;
  const [all, published] = [counts.speculated_chunks, counts.published_chunks];
  const kept = all ? `${((100 * published) / all).toFixed(1)} % of ${count(all)} kept` : "none yet";
  return element("p", { class: "quiet small" }, counts.unavailable
    ? `Does not update before decisions: ${counts.unavailable}`
    : `Updates before decisions: ${kept}, ${count(counts.redone_chunks)} done again, ${count(counts.paused_chunks)} chunks paused.`);
}

const FIRST_DECADE = -12; // PlaneSummary in state.proto.

const OPTIMIZERS = { SGD: "SGD", LION: "Lion", ADAGRAD: "Adagrad", SIGN_SGD: "SignSGD", MUON: "Muon" };
const optimizer = ({ rule, decoupled_weight_decay: decoupled }) => (rule === "ADAM" ? (decoupled ? "AdamW" : "Adam") : OPTIMIZERS[rule] || rule);

// All but the learning rate; of switches those that are not as usual.
function hyperParameters({ rule, lr, decoupled_weight_decay, ...values }) {
  return Object.entries(values).map(([name, value]) => {
    if (typeof value !== "boolean") return `${name} ${real(value)}`;
    return value === (name === "bias_correction") ? "" : `${value ? "" : "no "}${name}`;
  }).filter(Boolean).join(", ") || "–";
}

function groups(job) {
  const rows = job.groups.map(({ hyper_parameters: values, ...group }) => row([
    element("strong", null, bare(group.name)), optimizer(values), [real(values.lr)], hyperParameters(values), [count(group.parameter_count)],
    [count(group.trainable_elements)], `${group.wire_dtype} → ${group.return_dtype}`.toLowerCase(),
  ], { "data-key": group.name }));
  const limit = maxNorm(job);
  return card("groups", "Groups", limit ? `clipped to a norm of ${real(limit)}` : "not clipped",
    table(["Group", "Optimizer", ["Learning rate"], "Hyper-parameters", ["Parameters"], ["Elements"], "Wire"], rows));
}

function checkpoints(job) {
  const saves = job.saves.map((save) => element("div", { class: save.seconds_since_progress > 10 ? "note" : null },
    element("p", null, `Saving step ${count(save.step)} to `, element("code", null, save.directory), ` since ${seconds(save.seconds)}: `,
      element("span", { class: "bar" }, element("i", { "width%": save.size_bytes ? (100 * save.written_bytes) / save.size_bytes : 0 })),
      `${bytes(save.written_bytes)} of ${bytes(save.size_bytes)}`)));
  const found = job.found_checkpoint;
  const text = found
    ? element("p", null, `Step ${count(found.step)} is saved in `, element("code", null, found.directory),
      found.uid === job.uid ? "." : ", by another job of this name.",
      ` ${bytes(found.total_bytes)} in ${count(found.checkpoints)} ${found.checkpoints === 1 ? "checkpoint" : "checkpoints"} of this name.`)
    : element("p", { class: "quiet" }, "Nothing is known to be saved under this job's name.");
  return card("checkpoints", "Checkpoints", null, text, ...saves);
}

class Parameters {
  constructor(name) {
    this.job = name;
    this.chosen = null;
    this.list = element("ul", { class: "names" });
    this.hint = element("p", { class: "quiet small", role: "status" });
    this.panel = element("div", { "aria-live": "polite" }, element("p", { class: "quiet" }, "Choose a parameter to see how its weights and moments are distributed."));
    this.match = element("input", { type: "search", placeholder: "Part of a name", "aria-label": "Part of a parameter's name",
      input: () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.load(), 150); } });
    this.section = card("parameters", "Parameters", null, element("div", { class: "parameters" },
      element("div", null, element("div", { class: "tools" }, this.match), this.list, this.hint), this.panel));
  }

  async load() {
    const match = this.match.value;
    try {
      const answer = await ask("/api/parameters", { job: this.job, match });
      if (match !== this.match.value) return;
      this.list.replaceChildren(...answer.parameters.map(({ name, shape, trainable }) => element("li", null,
        element("button", { type: "button", "aria-pressed": String(bare(name) === this.chosen), "data-name": bare(name),
          click: () => this.choose(bare(name)) },
          element("span", null, bare(name)),
          element("span", { class: "shape" }, trainable ? shape.join(" × ") || "scalar" : "frozen")))));
      this.hint.textContent = answer.parameters.length < answer.matches
        ? `${answer.parameters.length} of ${count(answer.matches)} are shown`
        : plural(answer.matches, "parameter", "parameters");
    } catch (error) {
      this.hint.textContent = error.message;
    }
  }

  async choose(name) {
    this.chosen = name;
    for (const button of this.list.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.name === name));
    this.panel.replaceChildren(element("p", { class: "quiet" }, `Reading ${name} …`));
    try {
      const answer = await ask("/api/distribution", { job: this.job, parameter: name }, 60000);
      if (answer.unavailable) throw new Error(answer.unavailable);
      if (this.chosen === name) this.show(answer);
    } catch (error) {
      this.panel.replaceChildren(element("p", { class: "note" }, error.message));
    }
  }

  show(parameter) {
    const words = { MASTER: "Weights", EXP_AVG: "First moment", EXP_AVG_SQ: "Second moment", MAX_EXP_AVG_SQ: "Largest second moment",
      MOMENTUM_BUFFER: "Momentum", SUM: "Sum of squares" };
    const planes = parameter.planes.map((plane) => element("div", { class: "plane" },
      element("figure", null, element("figcaption", null, element("h3", null, words[plane.plane]),
        element("output", null, "magnitude by decade")), histogram(plane.magnitude_histogram, FIRST_DECADE, this.panel)),
      element("dl", { class: "line" }, [["norm", real(plane.norm)], ["mean", real(plane.mean)], ["min", real(plane.min)],
        ["max", real(plane.max)], ["zeros", count(plane.zeros)], ["not finite", count(plane.non_finite)]]
        .map(([label, value]) => element("div", null, element("dt", null, label), element("dd", null, value))))));
    const name = bare(parameter.name);
    const elements = parameter.shape.reduce((product, size) => product * size, 1);
    const [first] = parameter.planes; // A page asks one service, and a member of the job has a part.
    const here = first ? first.non_finite + first.zeros + first.magnitude_histogram.reduce((sum, some) => sum + some, 0) : elements;
    this.panel.replaceChildren(
      element("h3", null, name),
      element("p", { class: "quiet small" }, `${count(elements)} elements in group ${bare(parameter.group)}, at step ${count(parameter.step)}, ` +
        `${plural(parameter.update_count, "update", "updates")}`,
        " ", element("button", { type: "button", click: () => this.choose(name) }, "Read again")),
      here < elements ? element("p", { class: "quiet" }, `${count(here)} of them are here and shown; other members have the rest. ` +
        "The command line tool puts all together: ballast state.") : "",
      ...(planes.length ? planes : [element("p", { class: "quiet" }, "It is frozen: the service has no state for it.")]));
  }
}

export class JobView {
  constructor(main, name) {
    this.main = main;
    this.name = name;
    this.head = element("div");
    this.ranks = element("section");
    this.members = element("section", { hidden: true });
    this.memory = element("section");
    this.groups = element("section");
    this.checkpoints = element("section");
    this.steps = new Steps(name);
    this.parameters = new Parameters(name);
    this.timeline = new Timeline(name);
    this.begun = false;
  }

  begin() {
    this.main.replaceChildren(this.head, this.ranks, this.members, this.steps.section,
      element("div", { class: "two" }, this.memory, this.checkpoints), this.groups, this.parameters.section, this.timeline.section);
    this.parameters.load();
    this.begun = true;
  }

  gone(message) {
    this.begun = false;
    this.main.replaceChildren(element("h1", null, this.name),
      element("p", { class: "note" }, message), element("p", null, element("a", { href: "/" }, "All jobs")));
  }

  async update(job) {
    if (!this.begun) this.begin();
    await this.steps.update(job); // The head has the last step's numbers.
    morph(this.head, this.headOf(job));
    morph(this.ranks, ranks(job));
    morph(this.members, members(job) ?? element("section", { hidden: true }));
    morph(this.memory, memory(job));
    morph(this.groups, groups(job));
    morph(this.checkpoints, checkpoints(job));
  }

  headOf(job) {
    const [word, kind] = stateOf(job);
    const why = trouble(job);
    return element("div", null,
      element("div", { class: "head" }, element("h1", null, this.name), element("span", { class: `pill ${kind}` }, word)),
      element("nav", { class: "sections", "aria-label": "On this page" },
        [["ranks", "Ranks"], ["charts", "Steps"], ["memory", "Memory"], ["checkpoints", "Checkpoints"], ["groups", "Groups"],
          ["parameters", "Parameters"], ["timeline", "Timeline"]].map(([id, text]) => element("a", { href: `#${id}` }, text))),
      element("div", { role: "status", id: "trouble" }, why ? element("p", { class: `note ${why[1]}` }, element("strong", null, why[0])) : null),
      work(job.activities),
      element("dl", { class: `facts of${8 + this.steps.facts.length}` },
        fact("Step", count(job.committed_step)),
        fact("Pace", perSecond(rate(job.uid, job.committed_step))),
        fact("Last step", seconds(lastSeconds(job))),
        fact("Skipped", [count(job.skipped_steps), element("small", null, ` of ${count(job.applied_steps + job.skipped_steps)}`)]),
        fact("Clipped", [count(job.clipped_steps), element("small", null, ` of ${count(job.applied_steps)}`)]),
        fact("Parameters", [count(job.parameter_count), element("small", null, ` in ${count(job.chunk_count)} chunks`)]),
        fact("Gradients in", perSecondBytes(rate(`${job.uid} in`, job.gradient_bytes))),
        fact("Weights out", perSecondBytes(rate(`${job.uid} out`, job.weight_bytes))),
        this.steps.facts.map(([label, value]) => fact(label, value))));
  }
}

function perSecondBytes(value) {
  return value === null ? "…" : `${bytes(value)}/s`;
}
