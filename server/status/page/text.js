// Figures as people read them, and elements made of them.

export function count(value) {
  return value.toLocaleString("en-US");
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1000 && unit + 1 < units.length) {
    value /= 1024;
    ++unit;
  }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toPrecision(3)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  if (value < 60) return `${value < 10 ? value.toFixed(1) : value.toFixed(0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

// That `bytes` writes a number of.
export function unitOf(value) {
  return 1024 ** Math.max(0, Math.floor(Math.log2(value / 1000) / 10 + 1));
}

// null: not finite. JSON has an infinity and NaN as texts.
export function finite(value) {
  return typeof value === "number" ? value : null;
}

export function real(value) {
  if (finite(value) === null) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export const phases = {
  AWAITING_WEIGHTS: ["awaits weights", "wait"],
  READY: ["between steps", ""],
  OPEN: ["gathering", "work"],
  SEALED: ["deciding", "work"],
  VOTING: ["voting", "work"],
  UPDATING: ["updating", "work"],
  DIRECTIONS: ["orthogonalizing", "work"],
  BROKEN: ["broken", "bad"],
  CLOSED: ["closed", "bad"],
};

// "jobs/gpt/parameters/wte.weight" is wte.weight.
export function bare(name) {
  return name.replace(/^jobs\/([^/]*\/(groups|parameters)\/)?/, "");
}

export function card(id, title, hint, ...children) {
  return element("section", { class: "card", id, "aria-label": title },
    element("header", null, element("h2", null, title), hint ? element("p", null, hint) : null), ...children);
}

// Values at which an axis is labelled: at most about `most`, round, within [low, high].
export function ticks(low, high, most) {
  const rough = (high - low) / most;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const first = Math.ceil(low / step) * step;
  // Counted: a step below the precision of `first` would never arrive.
  const number = Math.min(Math.floor((high - first) / step + 1e-9), most);
  return Array.from({ length: number + 1 }, (_, index) => first + index * step);
}

// As real, short enough for an axis.
export function axis(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))} M`;
  return size >= 1e4 ? `${Number((value / 1e3).toPrecision(4))} k` : real(Number(value.toPrecision(6)));
}

const SVG = "http://www.w3.org/2000/svg";
const SVG_NAMES = new Set(["svg", "g", "path", "line", "rect", "circle", "text", "title", "polyline"]);

// element("a", {class: "name", href: "/"}, "text", child, [children]). Attributes that are null or false are
// left out; functions are listeners.
export function element(name, attributes, ...children) {
  const made = SVG_NAMES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(key, value);
    else if (key === "width%") made.style.width = `${value}%`;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Makes `old` what `made` is, and keeps what is the same: the focus, the place in a list that scrolls.
// Elements with data-own look after their own contents.
export function morph(old, made) {
  if (old.nodeType !== made.nodeType || old.nodeName !== made.nodeName ||
      (old.dataset?.key ?? "") !== (made.dataset?.key ?? "")) {
    old.replaceWith(made);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of made.attributes) {
    if (old.getAttribute(name) !== value) {
      if (name === "style") old.style.cssText = made.style.cssText;
      else old.setAttribute(name, value);
    }
  }
  if (old.dataset?.own !== undefined) return;
  const fresh = [...made.childNodes];
  const stale = [...old.childNodes];
  fresh.forEach((child, i) => (i < stale.length ? morph(stale[i], child) : old.append(child)));
  stale.slice(fresh.length).forEach((child) => child.remove());
}
