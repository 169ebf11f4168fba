// The status page: asks the service once a second while the page is visible, and shows what it says.
// "/" lists the jobs, "/?job=NAME" shows one.
import { JobView } from "./job.js";
import { spark } from "./charts.js";
import { ask, fact, hasToken, keepToken, meter, perSecond, rate, stateOf, trouble, work } from "./service.js";
import { bare, bytes, count, element, finite, morph, seconds } from "./text.js";

const EVERY_MS = 1000;

const main = document.getElementById("main");
const pulse = document.getElementById("pulse");
const jobName = new URLSearchParams(location.search).get("job");

class ServiceView {
  constructor() {
    this.body = element("div");
    main.replaceChildren(this.body);
  }

  update(service, { memory_used_bytes: used, memory_limit_bytes: limit, jobs, activities }) {
    const busy = rate("busy", service.update_busy_seconds);
    const threads = service.update_threads;
    morph(this.body, element("div", null,
      element("h1", null, "Jobs"),
      element("dl", { class: "facts" },
        fact("Service", service.ready ? "ready" : "stopping"),
        fact("Jobs", count(jobs.length)),
        fact("Memory", [bytes(used), element("small", null, ` of ${bytes(limit)}`)], meter(used, limit)),
        fact("Update threads busy", [busy === null ? "…" : `${((100 * busy) / threads).toFixed(0)} %`,
          element("small", null, ` of ${threads}`)], meter(busy ?? 0, threads)),
        fact("Running for", seconds(Date.now() / 1000 - service.start_time_seconds)),
        service.child_deaths ? fact("Deaths", count(service.child_deaths)) : null),
      work(activities, (activity) => bare(activity.job)),
      jobs.length === 0
        ? element("p", { class: "card quiet" }, "No job yet. A worker creates one when it starts.")
        : element("ul", { class: "jobs" }, jobs.map((job) => this.row(job)))));
  }

  row(job) {
    const [word, kind] = stateOf(job);
    const why = trouble(job);
    const cell = (label, value, name = "cell") => element("span", { class: name }, element("small", null, label), value);
    const name = bare(job.name);
    return element("li", { "data-key": name }, element("a", { href: `/?${new URLSearchParams({ job: name })}` },
      element("span", { class: "name" }, name),
      element("span", { class: "state" }, element("span", { class: `pill ${kind}` }, word)),
      cell("ranks", `${job.attached_ranks} of ${job.home_ranks}`),
      cell("step", count(job.committed_step)),
      cell("pace", perSecond(rate(job.uid, job.committed_step))),
      cell("gradient norm", spark(job.recent_steps.map(({ norm }) => finite(norm)))),
      cell("memory", bytes(job.memory.total_bytes + job.memory.shared_bytes)),
      why ? element("span", { class: `why ${why[1]}` }, why[0]) : null));
  }
}

function showPulse(ok, text) {
  pulse.className = ok ? "" : "off";
  document.body.classList.toggle("stale", !ok);
  if (pulse.textContent !== text) pulse.textContent = text;
}

function showFoot(service) {
  const facts = [`Ballast ${service.version}`, service.addresses.join(", "), `kernel ${service.kernel}`,
    `process ${service.process_id}`, `resident ${bytes(service.resident_bytes)}`, `instance ${service.instance_id.slice(0, 8)}`,
    ...(service.cluster ? [service.cluster] : [])];
  morph(document.getElementById("foot"), element("footer", { id: "foot" },
    element("ul", null, facts.map((text) => element("li", null, text)),
      hasToken() ? null : element("li", null, element("a", { href: "/metrics" }, "Metrics")))));
}

// Asks for a token in place of what is shown. Loading the page again is the simplest way to show all with it.
function askForToken(why) {
  if (document.getElementById("token")) return;
  const field = element("input", { id: "token", type: "password", autocomplete: "off", required: true });
  main.replaceChildren(element("form", {
    class: "card token",
    submit: (event) => {
      event.preventDefault();
      keepToken(field.value);
      location.reload();
    },
  }, element("h1", null, "Who looks?"), element("p", null, why),
  element("label", { for: "token" }, "Token "), field, " ", element("button", { type: "submit" }, "Look")));
  field.focus();
}

const view = jobName === null ? new ServiceView() : new JobView(main, jobName);
if (jobName !== null) {
  document.title = `${jobName} · Ballast`;
  document.getElementById("crumbs").append(jobName);
}

let turns = 0;
async function look() {
  try {
    // A job's own page needs little of the service, and that seldom.
    if (jobName === null || turns++ % 10 === 0) {
      const service = await ask("/api/service");
      showFoot(service);
      if (jobName === null) view.update(service, await ask("/api/jobs"));
    }
    if (jobName !== null) await view.update(await ask("/api/job", { job: jobName }));
    showPulse(true, "live");
  } catch (error) {
    if (error.code === 401 || error.code === 403) {
      askForToken(error.message);
      showPulse(false, "a token is needed");
    } else if (error.code === 404) {
      view.gone(error.message);
      showPulse(true, "live");
    } else {
      turns = 0;
      showPulse(false, error.code ? error.message : "no answer from the service");
    }
  }
}

// One answer is awaited before the next is asked for, and nothing is asked for a page that is not seen.
let waiting = false;
async function tick() {
  if (waiting || document.hidden) return;
  waiting = true;
  await look();
  waiting = false;
}
document.addEventListener("visibilitychange", tick);
setInterval(tick, EVERY_MS);
tick();
