// Keeps the page up to date: the same page is fetched again, and what changed of its live parts is put in place.
import {Charts} from "./charts.js";
import {FleetTable} from "./fleet.js";
import {get, read, Unreachable} from "./get.js";
import {PrefixMap} from "./map.js";

const EVERY_MS = 3000;
const LONGEST_WAIT_MS = 15000;

const root = document.documentElement;
const byId = (id) => document.getElementById(id);
root.classList.add("scripted");

const fleet = new FleetTable();
const map = new PrefixMap();
const charts = new Charts();

let paused = false;
let failures = 0;
let problem = "";
let lastSeen = new Date();
let timer = 0;

function clock(time) {
  return time.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false});
}

function patch(page) {
  const fresh = new DOMParser().parseFromString(page, "text/html");
  if (fresh.documentElement.dataset.build !== root.dataset.build) {
    location.reload();
    return;
  }
  for (const part of document.querySelectorAll("[data-live]")) {
    const news = fresh.getElementById(part.id);
    if (!news || news.innerHTML === part.dataset.shown) continue;
    part.dataset.shown = news.innerHTML;
    const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
    part.replaceChildren(...news.cloneNode(true).childNodes);
    if (focused) byId(focused)?.focus({preventScroll: true});
  }
  byId("named-section").hidden = fresh.getElementById("named-section").hidden;
  fleet.arrange();
}

function say() {
  const state = byId("state");
  if (paused) state.textContent = `Paused; shown as of ${clock(lastSeen)}`;
  else if (failures) state.textContent = `Not connected; shown as of ${clock(lastSeen)}`;
  else state.textContent = `Live; updated ${clock(lastSeen)}`;
  const lost = byId("lost");
  const words = `✗ Connection to the exporter lost since ${clock(lastSeen)} (${problem}): all figures are from then. Trying again …`;
  if (failures && lost.textContent !== words) lost.textContent = words;
  lost.hidden = !failures;
  root.classList.toggle("is-lost", failures > 0);
}

/** Do this with the exporter, and say when it can't be reached; a mistake of ours is for the console. */
async function attempt(work) {
  try {
    await work();
    lastSeen = new Date();
    failures = 0;
  } catch (error) {
    if (!(error instanceof Unreachable)) throw error;
    problem = error.message;
    failures += 1;
  } finally {
    say();
    clearTimeout(timer);
    timer = setTimeout(update, Math.min(EVERY_MS * 1.5 ** Math.max(0, failures - 1), LONGEST_WAIT_MS));
  }
}

async function update() {
  clearTimeout(timer);
  if (document.hidden || paused) return;
  await attempt(async () => {
    const page = await get(location.pathname);
    if (page) patch(await read(page, "text"));
    await Promise.all([map.update(), charts.update()]);
  });
}

const pause = byId("pause");
pause.hidden = false;
pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  say();
  update();
});
document.addEventListener("visibilitychange", update);
window.addEventListener("online", update);
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-node]");
  if (link && !link.closest("#map")) {
    map.zoom(link.dataset.node);
    byId("map").scrollIntoView({behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth"});
  }
});

const drawn = attempt(() => map.update());
fleet.arrange();
drawn.then(() => attempt(() => charts.update()));
