// The prefix map: what the fleet has cached, as an icicle. Width is tokens, colour and pattern a class, a badge copies.
import {forget, get, read, Unreachable} from "./get.js";
import {layOut, MEASURES} from "./icicle.js";
import {BADGE, element, FACTS, fit, html, long, NAME, patterned, patterns} from "./shapes.js";
import {count, percent, plural} from "./words.js";

const ROW = 44;
const GAP = 2;
const TABLE_ROWS = 200;
const byId = (id) => document.getElementById(id);

const SHARES = [
  {upTo: 0.2, words: "under 20 %", fill: "ramp-0", pattern: "dense"},
  {upTo: 0.4, words: "20 to 40 %", fill: "ramp-1", pattern: "sparse"},
  {upTo: 0.6, words: "40 to 60 %", fill: "ramp-2", pattern: "dots"},
  {upTo: 0.8, words: "60 to 80 %", fill: "ramp-3", pattern: ""},
  {upTo: Infinity, words: "80 % and more hit", fill: "ramp-4", pattern: "bar"}];
const COPIES = [
  {upTo: 1, words: "at 1 worker", fill: "copies-0", pattern: ""},
  {upTo: 2, words: "at 2", fill: "copies-1", pattern: "dots"},
  {upTo: 7, words: "at 3 to 7", fill: "copies-2", pattern: "sparse"},
  {upTo: Infinity, words: "at 8 and more", fill: "copies-3", pattern: "dense"}];
const UNKNOWN = {words: "no request", fill: "nothing", pattern: ""};

export class PrefixMap {
  constructor() {
    this.node = "";
    this.document = null;
    this.shown = "";
    this.focused = "";
    this.path = [];
    this.box = byId("map-box");
    this.filter = byId("map-filter");
    this.worker = byId("map-worker");
    this.colour = byId("map-colour");
    this.by = byId("map-width");
    this.filter.addEventListener("input", () => this.draw());
    this.worker.addEventListener("change", () => this.draw());
    this.colour.addEventListener("change", () => {
      this.colourChosen = true;
      this.draw();
    });
    this.by.addEventListener("change", () => {
      this.widthChosen = true;
      this.zoom(this.node);
    });
    this.filter.addEventListener("keydown", (event) => {
      const found = event.key === "Enter" && this.box.querySelector(".found");
      if (found) this.focus(found.dataset.id);
    });
    byId("map-up").addEventListener("click", () => this.up());
    byId("map-path").addEventListener("click", (event) => {
      const to = event.target.closest("button");
      if (to) this.zoom(to.dataset.node);
    });
    byId("map-table").addEventListener("toggle", () => this.drawTable());
    byId("map-table").addEventListener("click", (event) => {
      const to = event.target.closest("[data-node]");
      if (to) this.zoom(to.dataset.node);
    });
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("click", (event) => this.click(event));
    for (const kind of ["focusin", "pointerover"]) {
      this.box.addEventListener(kind, (event) => {
        const box = event.target.closest(".box");
        if (box) this.describe(this.placed.get(box.dataset.id)?.node);
      });
    }
    let last = 0;
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - last) > 1) {
        last = entry.contentRect.width;
        this.draw();
      }
    }).observe(this.box);
  }

  address() {
    const node = this.node ? `&node=${encodeURIComponent(this.node)}` : "";
    return `${document.body.dataset.map}&by=${this.by.value}${node}`;
  }

  async update() {
    if (this.by.value === "cached" && !this.widthChosen && this.flows()) this.by.value = "flow";
    const address = this.address();
    if (address !== this.shown) forget(address);
    const answer = await get(address);
    if (!answer || address !== this.address()) return;
    if (answer.status === 404) {
      this.say(`${(await read(answer, "json")).error}; back at the top`);
      this.node = "";
      this.path = [];
      await this.update();
      return;
    }
    this.document = await read(answer, "json");
    if (this.by.value === "flow" && !this.widthChosen && !this.flows()) {
      this.by.value = "cached";  // nothing has flowed: what is cached can be seen all the same
      await this.update();
      return;
    }
    this.shown = address;
    this.follow();
    this.draw();
  }

  /** Whether requests came through what is shown. */
  flows() {
    return this.document?.nodes.some((node) => node.flow_tokens_below > 0) ?? false;
  }

  /** Go to a node; its children are fetched as far as they weren't. */
  async zoom(id) {
    const entered = this.document?.nodes.some((node) => node.id === id);
    this.node = id;
    this.wantsFocus = this.box.contains(document.activeElement) || byId("map-path").contains(document.activeElement);
    if (entered && id) this.follow();
    try {
      await this.update();
    } catch (error) {
      if (!(error instanceof Unreachable)) throw error;
      this.say("The exporter doesn't answer: the map stays as it is until it does.");
    }
  }

  up() {
    const above = this.path.length > 1 ? this.path.at(-2).id : this.top()?.parent ?? "";
    this.focused = this.node;
    this.zoom(above);
  }

  top() {
    return this.node ? this.document?.nodes.find((node) => node.id === this.node) : undefined;
  }

  /** The way from the top to where we are, as far as it was seen. */
  follow() {
    const nodes = new Map((this.document?.nodes ?? []).map((node) => [node.id, node]));
    const way = [];
    for (let at = nodes.get(this.node); at; at = nodes.get(at.parent)) way.unshift({id: at.id, name: at.name});
    const joins = this.path.findIndex((step) => step.id === way[0]?.id);
    this.path = joins >= 0 ? [...this.path.slice(0, joins), ...way] : way;
  }

  say(words) {
    const note = byId("map-note");
    if (note.textContent !== words) note.textContent = words;
  }

  draw() {
    const data = this.document;
    if (!data) return;
    const empty = !data.nodes.length;
    byId("map-empty")?.remove();
    const hadFocus = this.wantsFocus || this.box.contains(document.activeElement);
    this.wantsFocus = false;
    this.drawTools();
    if (empty) {
      const why = data.absent?.nodes ?? "no block is cached now";
      this.box.replaceChildren(html("p", {class: "muted", id: "map-empty"}, `No map: ${why}.`));
      byId("map-text").textContent = "";
      byId("map-legend").replaceChildren();
      this.placed = new Map();
      this.describe(undefined);
      this.finish(0);
      return;
    }
    const across = Math.max(this.box.clientWidth, 240);
    const {boxes, rests, rows} = layOut(data.nodes, this.node, across, this.width);
    this.placed = new Map(boxes.map((box) => [box.node.id, box]));
    const height = rows * (ROW + GAP);
    const svg = element("svg", {width: across, height, viewBox: `0 0 ${across} ${height}`, role: "tree", "aria-label": "Prefixes. Arrow keys move, Enter zooms in, Escape zooms out."}, patterns());
    const classes = this.classes();
    const words = this.filter.value.trim().toLowerCase();
    if (!this.placed.has(this.focused)) this.focused = boxes[0].node.id;
    svg.append(...boxes.map((box) => this.drawBox(box, classes, words)));
    svg.append(...rests.map((rest) => this.drawRest(rest)));
    this.box.replaceChildren(svg);
    if (hadFocus) this.box.querySelector(`[data-id="${this.focused}"]`)?.focus({preventScroll: true});
    this.describe(this.placed.get(this.focused)?.node);
    this.drawTable();
    this.finish(boxes.length, words);
  }

  finish(boxes, words = "") {
    const found = this.box.querySelectorAll(".found").length;
    const absent = this.document.absent?.hit_share;
    const notes = [];
    if (words) notes.push(`${plural(found, "prefix", "prefixes")} found among the ${count(boxes)} drawn here.`);
    if (boxes && absent) notes.push(`Hit share and flow aren't known: ${absent}.`);
    else if (boxes && !this.known()) notes.push("No request came through in the last minutes, so there is no hit share.");
    if (this.document.unplaced_requests) notes.push(`${plural(this.document.unplaced_requests, "request")} ended at blocks that aren't in the tree.`);
    this.say(notes.join(" "));
    this.box.dataset.drawn = this.document.version ?? "nothing";
    this.box.dataset.boxes = String(boxes);
    if (!performance.getEntriesByName("map drawn").length) requestAnimationFrame(() => setTimeout(() => performance.mark("map drawn")));
  }

  get width() {
    return MEASURES[this.by.value];
  }

  known() {
    return this.document.nodes.some((node) => typeof node.hit_share === "number");
  }

  classes() {
    if (this.colour.value === "copies") return (node) => COPIES.find(({upTo}) => node.replicas <= upTo);
    return (node) => (typeof node.hit_share === "number" ? SHARES.find(({upTo}) => node.hit_share < upTo) : UNKNOWN);
  }

  drawTools() {
    const {totals, workers} = this.document;
    if (!this.colourChosen) this.colour.value = this.known() ? "hit" : "copies";
    byId("map-text").textContent = totals ? `${plural(totals.nodes, "prefix", "prefixes")}, ${plural(totals.tokens, "token")} cached once or more, ${count(totals.copied_tokens)} with copies; width is tokens ${this.by.value === "flow" ? "that flowed through in the last minutes" : "cached, copies counted"}` : "";
    const names = ["", ...(workers ?? [])];
    if (names.length !== this.worker.options.length || names.some((name, k) => this.worker.options[k].value !== name)) {
      const chosen = this.worker.value;
      this.worker.replaceChildren(...names.map((name) => html("option", {value: name}, name || "any worker")));
      this.worker.value = names.includes(chosen) ? chosen : "";
    }
    byId("map-up").disabled = !this.node;
    const steps = [{id: "", name: "all prefixes"}, ...this.path];
    byId("map-path").replaceChildren(...steps.flatMap((step, k) => (k === steps.length - 1
      ? [html("span", {"aria-current": "location"}, step.name)]
      : [html("button", {type: "button", class: "link", "data-node": step.id}, step.name), "›"])));
    const legend = this.colour.value === "copies" ? COPIES : this.known() ? [...SHARES, UNKNOWN] : [UNKNOWN];
    const look = legend.map(({words, fill, pattern}) => {
      const swatch = element("svg", {width: 26, height: 16, "aria-hidden": "true"}, element("rect", {width: 26, height: 16, class: fill}));
      if (pattern) swatch.append(patterned(pattern, {width: 26, height: 16}));
      return html("li", {}, swatch, words);
    });
    const badge = element("svg", {width: 26, height: 16, class: "badged", "aria-hidden": "true"},
      element("rect", {width: 26, height: 16, rx: 3, class: "badge"}), element("text", {x: 13, y: 12, "text-anchor": "middle", class: "badge-text"}, "×3"));
    byId("map-legend").replaceChildren(...look, html("li", {}, badge, "held by 3 workers"), html("li", {}, "blank below a box: tokens of its own"));
  }

  matches(node, words) {
    return words !== "" && (node.name.toLowerCase().includes(words) || node.id.startsWith(words));
  }

  above(node) {
    const found = [];
    for (let at = this.placed.get(node.parent); at; at = this.placed.get(at.node.parent)) found.push(at.node);
    return found;
  }

  drawBox({node, x, row, width: across, leftOut}, classes, words) {
    const y = row * (ROW + GAP);
    const {fill, pattern} = classes(node);
    const found = this.matches(node, words);
    const held = !this.worker.value || this.worker.value in (node.workers ?? {});
    const dim = (words && !found && !this.above(node).some((one) => this.matches(one, words))) || !held;
    const group = element("g", {class: `box${dim ? " dim" : ""}${found ? " found" : ""}`, role: "treeitem", "data-id": node.id,
      tabindex: node.id === this.focused ? 0 : -1, "aria-level": row + 1, "aria-label": this.words(node, held)});
    if (node.children) group.setAttribute("aria-expanded", String(!leftOut));
    const place = {x: x.toFixed(1), y, width: across.toFixed(1), height: ROW};
    group.append(element("rect", {...place, rx: Math.min(3, across / 4), class: `fill ${fill}`}));
    if (pattern && across > 4) group.append(patterned(pattern, place));
    this.label(group, node, x, y, across, found);
    group.append(element("rect", {x: (x + 1.5).toFixed(1), y: y + 1.5, width: Math.max(across - 3, 1).toFixed(1), height: ROW - 3, rx: 2, class: "ring"}));
    return group;
  }

  /** Siblings too narrow to be drawn one by one. */
  drawRest({x, row, width: across, nodes}) {
    const y = row * (ROW + GAP);
    const words = `+${count(nodes)}`;
    const group = element("g", {"aria-hidden": "true"}, element("rect", {x: x.toFixed(1), y, width: across.toFixed(1), height: ROW, class: "rest"}),
      element("title", {}, `${plural(nodes, "smaller prefix", "smaller prefixes")}: zoom in to see them`));
    if (across > long(words, FACTS) + 4) group.append(element("text", {x: (x + across / 2).toFixed(1), y: y + 26, "text-anchor": "middle", class: "rest-text"}, words));
    return group;
  }

  label(group, node, x, y, across, found) {
    const badge = `×${node.replicas}`;
    const badgeWidth = long(badge, BADGE) + 8;
    const badged = node.replicas > 1 && across > badgeWidth + 8;
    if (badged) {
      const left = x + across - badgeWidth - 4;
      group.append(element("rect", {x: left.toFixed(1), y: y + 5, width: badgeWidth, height: 16, rx: 3, class: "badge"}),
        element("text", {x: (left + badgeWidth / 2).toFixed(1), y: y + 17, "text-anchor": "middle", class: "badge-text"}, badge));
    }
    const name = fit(`${found ? "▸ " : ""}${node.name}`, NAME, across - 12 - (badged ? badgeWidth + 2 : 0));
    if (name) group.append(element("text", {x: (x + 6).toFixed(1), y: y + 17, class: "name"}, name));
    const share = typeof node.hit_share === "number" ? ` · ${percent(node.hit_share)} hit` : "";
    const tokens = count(this.width(node));
    const facts = [`${tokens} tokens${share}`, `${tokens}${share}`, tokens].find((words) => long(words, FACTS) <= across - 12);
    if (facts) group.append(element("text", {x: (x + 6).toFixed(1), y: y + 34, class: "facts"}, facts));
  }

  words(node, held = true) {
    const parts = [node.name, `${count(this.width(node))} tokens`];
    if (typeof node.hit_share === "number") parts.push(`${percent(node.hit_share)} hit`);
    parts.push(`held by ${plural(node.replicas, "worker")}`);
    if (node.children) parts.push(plural(node.children, "continuation"));
    if (!held) parts.push(`not held by ${this.worker.value}`);
    return parts.join(", ");
  }

  describe(node) {
    const panel = byId("map-detail");
    if (!node) {
      panel.replaceChildren();
      return;
    }
    const holders = Object.entries(node.workers ?? {}).sort((a, b) => b[1] - a[1]);
    const shown = holders.slice(0, 6).map(([name, blocks]) => `${name} (${count(blocks)})`);
    if (node.replicas > shown.length) shown.push(`${node.replicas - shown.length} more`);
    const one = this.worker.value && `${this.worker.value} holds ${count(node.workers?.[this.worker.value] ?? 0)} of its ${plural(node.blocks, "block")}. `;
    const asked = plural(node.requests ?? 0, "request");
    const hit = typeof node.hit_share === "number" ? `${asked} came through in the last 5 to 10 minutes, ${percent(node.hit_share)} found it cached. ` : node.requests === 0 ? "No request came through in the last minutes. " : "";
    panel.replaceChildren(
      html("p", {}, html("strong", {}, node.name), ` begins after ${plural(node.start_tokens, "token")}; ${plural(node.tokens, "token")} of its own in ${plural(node.blocks, "block")}, ${count(node.cached_tokens_below)} with ${node.children ? plural(node.children, "continuation") : "nothing"} below, ${count(node.copied_tokens_below)} with copies. ${hit}${one || ""}`),
      html("p", {class: "muted"}, `Held by ${plural(node.replicas, "worker")}${shown.length ? `, blocks of it: ${shown.join(", ")}` : ""}. Id ${node.id}.`));
  }

  drawTable() {
    const details = byId("map-table");
    if (!details.open || !this.document) return;
    const rows = [...this.placed.values()].slice(0, TABLE_ROWS);
    const known = this.known();
    const head = ["prefix", "level", "tokens", ...(known ? ["hit share"] : []), "workers", "continuations"];
    const cell = (words) => html("td", {}, words);
    const body = rows.map(({node, row}) => html("tr", {},
      html("th", {scope: "row"}, "\u2003".repeat(row), html("button", {type: "button", class: "link", "data-node": node.id}, node.name)),
      cell(String(node.level)), cell(count(this.width(node))), ...(known ? [cell(typeof node.hit_share === "number" ? percent(node.hit_share) : "–")] : []), cell(count(node.replicas)), cell(count(node.children))));
    const left = this.placed.size - rows.length;
    const table = html("table", {}, html("thead", {}, html("tr", {}, ...head.map((name) => html("th", {scope: "col"}, name)))), html("tbody", {}, ...body));
    const place = details.querySelector(".table");
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.node : "";
    place.replaceChildren(table, ...(left > 0 ? [html("p", {class: "muted"}, `${count(left)} smaller ones are left out: zoom in to see them.`)] : []));
    if (focused) place.querySelector(`[data-node="${focused}"]`)?.focus({preventScroll: true});
  }

  click(event) {
    const box = event.target.closest(".box");
    if (!box) return;
    this.focus(box.dataset.id);
    this.enter(box.dataset.id);
  }

  enter(id) {
    if (id === this.node) this.up();
    else this.zoom(id);
  }

  focus(id) {
    const next = this.box.querySelector(`[data-id="${id}"]`);
    if (!next) return;
    this.box.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    this.focused = id;
    next.setAttribute("tabindex", "0");
    next.focus({preventScroll: true});
  }

  key(event) {
    const at = this.placed.get(this.focused);
    if (!at || event.ctrlKey || event.metaKey || event.altKey) return;
    const inRow = [...this.placed.values()].filter(({row}) => row === at.row);
    const here = inRow.indexOf(at);
    const moves = {
      ArrowRight: () => inRow[here + 1], ArrowLeft: () => inRow[here - 1], Home: () => inRow[0], End: () => inRow.at(-1),
      ArrowUp: () => this.placed.get(at.node.parent),
      ArrowDown: () => [...this.placed.values()].find(({node}) => node.parent === at.node.id)};
    if (event.key in moves) {
      const to = moves[event.key]();
      if (to) this.focus(to.node.id);
    } else if (event.key === "Enter" || event.key === " ") this.enter(this.focused);
    else if ((event.key === "Escape" || event.key === "Backspace") && this.node) this.up();
    else return;
    event.preventDefault();
  }
}
