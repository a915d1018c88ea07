// Keeps the page up to date: the same page is fetched again, and what changed of its live parts is put in place.
import {PrefixMap} from "./map.js";
import {Charts} from "./charts.js";
import {FleetTable} from "./fleet.js";

const EVERY_MS = 3000;
const LONGEST_WAIT_MS = 15000;
const TIMEOUT_MS = 10000;

const root = document.documentElement;
const byId = (id) => document.getElementById(id);
root.classList.add("scripted");

const fleet = new FleetTable();
const map = new PrefixMap(get);
const charts = new Charts(get);
const etags = new Map();

let paused = false;
let failures = 0;
let lastSeen = new Date();
let timer = 0;

/** The answer, or null when it hasn't changed since it was last asked for. Throws when there is none. */
async function get(url) {
  const headers = etags.has(url) ? {"If-None-Match": etags.get(url)} : {};
  const answer = await fetch(url, {headers, signal: AbortSignal.timeout(TIMEOUT_MS)});
  if (answer.status === 304) return null;
  if (!answer.ok && answer.status !== 404 && answer.status !== 400) throw new Error(`HTTP ${answer.status}`);
  const etag = answer.headers.get("ETag");
  if (answer.ok && etag) {
    if (etags.size > 500) etags.clear();
    etags.set(url, etag);
  }
  return answer;
}

/** Forget what was seen of an address: the next answer comes whole. */
get.forget = (url) => etags.delete(url);

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
  const words = `✗ Connection lost since ${clock(lastSeen)}: all figures are from then. Trying again …`;
  if (failures && lost.textContent !== words) lost.textContent = words;
  lost.hidden = !failures;
  root.classList.toggle("is-lost", failures > 0);
}

async function update() {
  clearTimeout(timer);
  if (document.hidden || paused) return;
  try {
    const page = await get(location.pathname);
    if (page) patch(await page.text());
    lastSeen = new Date();
    failures = 0;
    await Promise.all([map.update(), charts.update()]);
  } catch (error) {
    if (!["TypeError", "TimeoutError", "AbortError"].includes(error.name) && !error.message.startsWith("HTTP")) throw error;
    failures += 1;
  } finally {
    say();
    clearTimeout(timer);
    timer = setTimeout(update, Math.min(EVERY_MS * 1.5 ** Math.max(0, failures - 1), LONGEST_WAIT_MS));
  }
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

const drawn = map.update();
fleet.arrange();
drawn.then(() => charts.start(document.body.dataset.plotly)).finally(() => {
  say();
  timer = setTimeout(update, EVERY_MS);
});
