// The live page of a run.
//
// Data of the run is inserted as text, never as markup. Only changed parts are updated. Ages and durations are computed
// here, so nothing is sent while nothing happens; a hidden page computes nothing.
"use strict";
(() => {
  const KEY = new URLSearchParams(location.search).get("key") || "";
  const MAX_CARDS = 40; // more nodes are shown as tiles
  const MAX_EVENTS = 200;
  const MAX_LINES = 3000;
  const GENERATIONS_SHOWN = 8;
  const SILENT_MS = 40_000; // the server sends a heartbeat every 15 s
  const GIVE_UP_MS = 60_000;
  const STATES = ["hanging", "draining", "stopping", "starting", "waiting", "joined", "working", "spare", "done"];
  const GLYPHS = {
    working: "●", running: "●", starting: "◐", waiting: "◌", gathering: "◌", recovering: "◌", paused: "‖",
    stopping: "◑", ending: "◑", draining: "▽", done: "✓", joined: "○", spare: "◇", over: "■",
    hanging: "⚠", failed: "✕", succeeded: "✓", cancelled: "■",
  };
  const PHASES = {
    gathering: "gathering nodes", recovering: "recovering", running: "running", ending: "stopping workers",
    paused: "waiting to restart", over: "ended",
  };
  const OUTCOMES = {
    succeeded: "succeeded", failed: "failed", cancelled: "was cancelled", abandoned: "was abandoned",
    broken: "could not continue",
  };
  const ENDS = { // of a generation
    failure: "a worker failed", loss: "a node was lost", join: "a node joined", drain: "a node was drained",
    request: "restarted by an operator", latecomer: "a node reconnected too late",
  };
  const SPENT = [
    ["training", "training"], ["starting", "starting"], ["waiting", "waiting for nodes"], ["stopping", "stopping"],
    ["hung", "hung"], ["lost", "lost (repeated)"],
  ];
  const SPANS = ["waiting", "starting", "training", "hung", "lost", "stopping"]; // in chronological order

  const $ = (id) => document.getElementById(id);

  // --- helpers -----------------------------------------------------------------------------------------------------

  function make(tag, className = "", text = "") {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text) element.textContent = text;
    return element;
  }

  function write(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  function attribute(element, name, value) {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  }

  /** Set the children in this order, moving as few as possible. */
  function arrange(parent, children) {
    const kept = new Set(children);
    for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
    let at = parent.firstElementChild;
    for (const child of children) {
      if (child === at) at = at.nextElementSibling;
      else parent.insertBefore(child, at);
    }
  }

  const two = (number) => String(number).padStart(2, "0");
  const count = (number) => number.toLocaleString("en-US");
  const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

  function duration(seconds, fine = true) {
    const s = Math.max(0, seconds);
    const units = (n, per, unit, small) => `${Math.floor(n / per)} ${unit}${n % per ? ` ${n % per} ${small}` : ""}`;
    if (fine && s < 9.95) return `${Math.round(s * 10) / 10} s`;
    const whole = Math.round(s);
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return units(whole, 60, "min", "s");
    if (whole < 86400) return units(Math.floor(whole / 60), 60, "h", "min");
    return units(Math.floor(whole / 3600), 24, "d", "h");
  }

  /** The same for durations below a second. */
  function brief(seconds) {
    if (seconds < 0.001) return "< 1 ms";
    return seconds < 0.9995 ? `${Math.round(seconds * 1000)} ms` : duration(seconds);
  }

  function percent(part, whole) {
    const share = whole > 0 ? (100 * part) / whole : 0;
    if (share >= 99.5 && share < 100) return `${(Math.floor(share * 10) / 10).toFixed(1)} %`;
    if (share > 0 && share < 0.5) return "< 1 %";
    return `${Math.round(share)} %`;
  }

  function clock(epoch) {
    const at = new Date(epoch * 1000);
    return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  }

  /** Remove control codes from a worker's output; of an overwritten line, keep the last state. */
  function harmless(text) {
    return text
      .replace(/\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)/g, "")
      .replace(/^.*\r(?=.)/, "")
      .replace(/(?![\t\n])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, "");
  }

  // --- state -------------------------------------------------------------------------------------------------------

  let run = null; // the fields of the run itself
  let nodes = new Map(); // by id
  let generations = new Map(); // by number
  let failures = [];
  let earlier = [];
  let goodput = null;
  let knownAt = 0; // the time of this state, on the run's clock
  let ahead = null; // how far that clock is ahead of the browser's, in seconds
  let isLive = false;
  const changed = { run: false, nodes: new Set(), allNodes: false, generations: new Set(), failures: false, events: [] };

  const now = () => (isLive ? Date.now() / 1000 + (ahead || 0) : knownAt);

  function syncClock(runTime) {
    const difference = runTime - Date.now() / 1000; // too small by the latency of the message
    if (ahead === null || difference > ahead || ahead - difference > 5) ahead = difference;
    knownAt = runTime;
  }

  function takeWhole(status) {
    const { nodes: itsNodes, generations: itsGenerations, events, failures: f, earlier: e, goodput: g, ...rest } = status;
    syncClock(status.now);
    run = rest;
    nodes = new Map(itsNodes.map((node) => [node.node_id, prepared(node)]));
    generations = new Map(itsGenerations.map((entry) => [entry.number, { ...entry, receivedAt: status.now }]));
    failures = f;
    earlier = e;
    goodput = g;
    eventsList.replaceChildren();
    changed.events = events;
    changed.run = changed.allNodes = changed.failures = true;
    changed.generations = new Set(generations.keys());
    generationsList.replaceChildren();
    rows.clear();
    schedule();
  }

  function takeChange(change) {
    if (run === null) return;
    syncClock(change.now);
    const before = { phase: run.phase, generation: run.generation, hangs: hangs() };
    Object.assign(run, change.run || {});
    goodput = change.goodput;
    for (const node of change.nodes || []) {
      nodes.set(node.node_id, prepared(node));
      changed.nodes.add(node.node_id);
    }
    for (const id of change.gone || []) {
      nodes.delete(id);
      changed.nodes.add(id);
    }
    for (const entry of change.generations || []) {
      generations.set(entry.number, { ...entry, receivedAt: change.now });
      changed.generations.add(entry.number);
    }
    for (const number of [...generations.keys()]) {
      if (number < (change.oldest_generation || 0)) {
        generations.delete(number);
        changed.generations.add(number);
      }
    }
    if (change.failures) { failures = change.failures; changed.failures = true; }
    if (change.earlier) { earlier = change.earlier; changed.failures = true; }
    changed.events.push(...(change.events || []));
    changed.run = true;
    if (before.hangs !== hangs()) {
      changed.allNodes = true;
      changed.generations.add(run.generation);
    }
    announceChange(before);
    schedule();
  }

  /** Add omitted default values, and the text that the filter searches. */
  function prepared(node) {
    const full = {
      slots: 1, rank: -1, first_rank: -1, pids: [], steps: [], phases: [], failed: [], step_at: null,
      outputs: [], stepped: [], step_s: [], cpus: [], gpus: [],
      is_coordinator: false, ...node,
    };
    full.searchText = `${full.name} ${full.host} ${full.node_id}`.toLowerCase();
    return full;
  }

  // --- a hang ------------------------------------------------------------------------------------------------------

  const hangs = () => run.phase !== "over" && run.hang_since != null;

  function hangText() {
    const text = `generation ${run.generation} seems to hang: no activity for ${duration(now() - run.hang_since, false)}`;
    return run.hang_where ? `${text}; ${run.hang_where}` : text;
  }

  /** The state shown for a node: during a hang, a working node is not shown as working. */
  const stateOf = (node) => (node.state === "working" && hangs() ? "hanging" : node.state);

  // --- drawing -----------------------------------------------------------------------------------------------------

  let isScheduled = false;

  function schedule() {
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(draw);
  }

  function draw() {
    isScheduled = false;
    if (run === null) return;
    if (changed.run) drawRun();
    if (changed.allNodes || changed.nodes.size) drawNodes();
    if (changed.generations.size) drawGenerations();
    if (changed.failures) drawFailures();
    if (changed.events.length) drawEvents();
    drawTimes();
    changed.run = changed.allNodes = changed.failures = false;
    changed.nodes.clear();
    changed.generations.clear();
    changed.events = [];
  }

  /** Update what changes only with time. */
  function drawTimes() {
    if (run === null) return;
    if (hangs()) write($("doing"), hangText());
    drawAges();
    drawLedger();
    drawCurrentGeneration();
  }

  // --- the top -----------------------------------------------------------------------------------------------------

  function drawRun() {
    const isOver = run.phase === "over";
    const shown = isOver ? run.outcome || "over" : run.phase;
    write($("run-id"), run.run_id || "this run");
    const hang = hangs();
    const label = hang ? "seems to hang" : PHASES[shown] || shown;
    write($("phase"), `${hang ? "⚠" : GLYPHS[shown] || "○"} ${label}`);
    $("phase").className = `badge is-${hang ? "hanging" : shown}`;
    const slow = (run.slow || []).map((text) => `; slow: ${text}`).join("");
    write($("doing"), hang ? hangText() : isOver ? run.why || run.doing : `${run.doing}${slow}`);
    $("doing").classList.toggle("hangs", hang);
    document.title = `${label} · ${run.run_id || "tenax"}`;
    const workers = [...nodes.values()].reduce((sum, node) => sum + (node.rank >= 0 ? node.slots : 0), 0);
    const bounds = run.min_nodes === run.max_nodes ? run.max_nodes : `${run.min_nodes} to ${run.max_nodes}`;
    fact("fact-generation", run.generation || "none yet");
    const gone = run.left || [];
    fact("fact-nodes", count(nodes.size), ` of ${bounds}${gone.length ? `, ${count(gone.length)} left` : ""}`);
    $("left").hidden = !gone.length;
    $("left").replaceChildren(...gone.map((node) => make("li", "", leftText(node))));
    fact("fact-workers", count(run.phase === "running" ? run.world_size : workers));
    const left = Math.max(0, run.max_restarts - run.restarts_used);
    const requested = run.requests ? `, ${run.requests} by operators` : "";
    if (run.max_restarts || run.restarts_used) fact("fact-restarts", `${run.restarts_used} used`, `, ${left} left of ${run.max_restarts}${requested}`);
    else fact("fact-restarts", "0", ` allowed${requested}`);
    fact("fact-membership", many(run.membership_changes, "change"), run.drains ? `, ${many(run.drains, "drain")}` : "");
    $("restart").disabled = !isLive || !["running", "paused"].includes(run.phase);
    $("stop").disabled = !isLive || isOver;
    $("restart").hidden = $("stop").hidden = isOver;
    for (const card of cards.values()) allowDrain(card);
  }

  const canDrain = (node) => isLive && node.state !== "draining" && run.phase !== "over";

  function allowDrain(card) {
    card.drain.disabled = !canDrain(card.node);
    card.drain.hidden = run.phase === "over";
  }

  function fact(id, value, more = "") {
    const element = $(id);
    if (element.textContent === `${value}${more}`) return;
    element.replaceChildren(document.createTextNode(String(value)));
    if (more) element.append(make("small", "", more));
  }

  // --- nodes -------------------------------------------------------------------------------------------------------

  const cards = new Map(); // by id: a card that is shown
  const tiles = new Map();
  const groups = new Map(); // by state
  const opened = new Set(); // nodes whose tile was opened
  const nodesBox = $("nodes");
  const cardsBox = make("div", "cards");
  let onlyState = "";

  function drawNodes() {
    const focused = document.activeElement;
    drawChips();
    const found = matching();
    const asTiles = found.length > MAX_CARDS;
    const withCard = asTiles ? [...opened].map((id) => nodes.get(id)).filter(Boolean) : found;
    for (const id of [...opened]) if (!nodes.has(id)) opened.delete(id);
    keepOnly(cards, new Set(withCard.map((node) => node.node_id)));
    arrange(cardsBox, withCard.map(cardOf));
    const boxes = withCard.length || !asTiles ? [cardsBox] : [];
    if (asTiles) boxes.push(...drawGroups(found));
    else tiles.clear();
    arrange(nodesBox, boxes);
    drawNote(found, asTiles);
    if (focused && focused !== document.activeElement && focused.isConnected && nodesBox.contains(focused)) {
      focused.focus({ preventScroll: true });
    }
  }

  function keepOnly(shown, ids) {
    for (const id of [...shown.keys()]) if (!ids.has(id)) shown.delete(id);
  }

  function drawNote(found, asTiles) {
    let text = "";
    if (!nodes.size) text = "No node has joined yet.";
    else if (!found.length) text = "No node matches.";
    else if (found.length < nodes.size) text = `${count(found.length)} of ${many(nodes.size, "node")} shown.`;
    if (asTiles) text = `${text} Open a node to see its workers and their logs.`.trim();
    $("nodes-note").hidden = !text;
    write($("nodes-note"), text);
  }

  function matching() {
    const terms = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (const node of nodes.values()) {
      if (onlyState && (onlyState === "failed" ? !node.failed.length : stateOf(node) !== onlyState)) continue;
      if (terms.every((term) => matches(node, term))) found.push(node);
    }
    return found.sort(byRank);
  }

  function matches(node, term) {
    if (/^\d+$/.test(term)) {
      const rank = Number(term);
      if (node.first_rank >= 0 && rank >= node.first_rank && rank < node.first_rank + node.slots) return true;
    }
    return node.searchText.includes(term) || stateOf(node).includes(term);
  }

  function byRank(one, other) {
    if (one.rank !== other.rank) {
      if (one.rank < 0) return 1;
      return other.rank < 0 ? -1 : one.rank - other.rank;
    }
    return one.name < other.name ? -1 : 1;
  }

  function drawChips() {
    const numbers = new Map();
    for (const node of nodes.values()) {
      numbers.set(stateOf(node), (numbers.get(stateOf(node)) || 0) + 1);
      if (node.failed.length) numbers.set("failed", (numbers.get("failed") || 0) + 1);
    }
    const chips = $("states");
    if (onlyState && !numbers.has(onlyState)) numbers.set(onlyState, 0);
    const known = new Map([...chips.children].map((chip) => [chip.dataset.state, chip]));
    const order = ["failed", ...STATES, ...[...numbers.keys()].filter((each) => !STATES.includes(each) && each !== "failed")];
    arrange(chips, order.filter((state) => numbers.has(state)).map((state) => {
      const chip = known.get(state) || make("button", `is-${state}`);
      chip.type = "button";
      chip.dataset.state = state;
      write(chip, `${GLYPHS[state] || "○"} ${count(numbers.get(state))} ${state === "failed" ? "with failed workers" : state}`);
      attribute(chip, "aria-pressed", String(onlyState === state));
      return chip;
    }));
  }

  function cardOf(node) {
    let card = cards.get(node.node_id);
    if (card && !changed.allNodes && !changed.nodes.has(node.node_id)) return card.element;
    if (!card) {
      card = newCard(node);
      cards.set(node.node_id, card);
    }
    fillCard(card, node);
    return card.element;
  }

  function newCard(node) {
    const card = { element: make("article", "node"), node };
    const title = make("div", "title");
    card.name = make("span", "name");
    card.state = make("span", "state");
    title.append(card.name, card.state);
    card.line = make("div", "line");
    card.ranks = make("span");
    card.host = make("span");
    card.steps = make("span", "steps");
    card.coordinator = make("span", "tag", "coordinator");
    card.drain = make("button", "drain", "Drain…");
    card.drain.type = "button";
    card.line.append(card.ranks, card.host, card.coordinator);
    card.second = make("div", "line foot");
    card.second.append(card.steps, card.drain);
    card.workers = make("div", "workers");
    card.element.append(title, card.line, card.workers, card.second);
    card.element.dataset.node = node.node_id;
    return card;
  }

  function fillCard(card, node) {
    card.node = node;
    const shown = stateOf(node);
    card.element.className = `node is-${node.failed.length ? "failed" : shown}`;
    attribute(card.element, "aria-label", `${node.name}, ${shown}`);
    write(card.name, node.name);
    card.state.className = `state is-${shown}`;
    const last = node.first_rank + node.slots - 1;
    const ranks = last > node.first_rank ? `ranks ${node.first_rank}–${last}` : `rank ${node.first_rank}`;
    write(card.ranks, node.rank >= 0 ? `node ${node.rank}, ${ranks}` : many(node.slots, "worker"));
    write(card.host, node.host === node.name ? "" : node.host);
    card.host.hidden = node.host === node.name;
    card.coordinator.hidden = !node.is_coordinator;
    allowDrain(card);
    attribute(card.drain, "aria-label", `Drain ${node.name}…`);
    fillWorkers(card, node);
    drawAge(card);
  }

  function fillWorkers(card, node) {
    while (card.workers.children.length > node.slots) card.workers.lastElementChild.remove();
    for (let local = 0; local < node.slots; local += 1) {
      let button = card.workers.children[local];
      if (!button) {
        button = make("button", "worker");
        button.type = "button";
        button.dataset.local = String(local);
        button.append(make("span", "glyph"), make("span"));
        button.firstElementChild.setAttribute("aria-hidden", "true");
        card.workers.append(button);
      }
      const [state, label] = workerState(node, local);
      const rank = node.first_rank >= 0 ? node.first_rank + local : -1;
      const about = [
        rank >= 0 ? `rank ${rank}` : `worker ${local}`, label, node.pids[local] ? `pid ${node.pids[local]}` : "",
        node.steps[local] >= 0 ? `step ${count(node.steps[local])}` : "",
      ].filter(Boolean).join(", ");
      const className = `worker is-${state}`;
      if (button.className !== className) button.className = className;
      write(button.firstElementChild, GLYPHS[state] || "◆");
      write(button.lastElementChild, rank >= 0 ? String(rank) : `#${local}`);
      attribute(button, "aria-label", `${about}: show its log`);
      button.about = about;
      attribute(button, "title", [about, ...activity(node, local)].join(", "));
      attribute(button, "aria-pressed", String(Boolean(log && log.node === node.node_id && log.local === local)));
    }
  }

  /** What a worker did last, and how fast it is. */
  function activity(node, local) {
    const ago = (at) => `${duration(Math.max(0, now() - at), false)} ago`;
    return [
      node.outputs[local] ? `last output ${ago(node.outputs[local])}` : "",
      node.stepped[local] ? `last step ${ago(node.stepped[local])}` : "",
      node.step_s[local] ? `${brief(node.step_s[local])} per step` : "",
      node.cpus[local] >= 0 ? `${Math.round(100 * node.cpus[local])} % of a CPU` : "",
      node.gpus[local] >= 0 ? `${Math.round(100 * node.gpus[local])} % of its GPU` : "",
    ].filter(Boolean);
  }

  function workerState(node, local) {
    if (node.failed.includes(local)) return ["failed", "failed"];
    if (stateOf(node) === "working") return node.phases[local] ? ["phase", node.phases[local]] : ["running", "running"];
    return [stateOf(node), stateOf(node)];
  }

  function drawAges() {
    for (const card of cards.values()) drawAge(card);
  }

  function drawAge(card) {
    const node = card.node;
    const shown = stateOf(node);
    const since = shown === "hanging" ? run.hang_since : node.since;
    write(card.state, `${GLYPHS[shown] || "○"} ${shown} for ${duration(now() - since, false)}`);
    const steps = node.steps.filter((step) => step >= 0);
    let text = "";
    if (steps.length) {
      const low = Math.min(...steps);
      const high = Math.max(...steps);
      text = low === high ? `step ${count(high)}` : `steps ${count(low)}–${count(high)}`;
      if (node.step_at) text += `, ${duration(now() - node.step_at, false)} ago`;
    }
    const outputs = node.outputs.filter(Boolean);
    if (outputs.length) {
      const oldest = `oldest output ${duration(Math.max(0, now() - Math.min(...outputs)), false)} ago`;
      text = [text, oldest].filter(Boolean).join("; ");
    }
    for (const button of card.workers.children) {
      const title = [button.about, ...activity(node, Number(button.dataset.local))].join(", ");
      attribute(button, "title", title);
    }
    const phases = [...new Set(node.phases.filter(Boolean))];
    if (phases.length) text = [text, phases.join(", ")].filter(Boolean).join("; ");
    write(card.steps, text);
  }

  function drawGroups(found) {
    const byState = new Map();
    for (const node of found) {
      if (!byState.has(stateOf(node))) byState.set(stateOf(node), []);
      byState.get(stateOf(node)).push(node);
    }
    keepOnly(tiles, new Set(found.map((node) => node.node_id)));
    const order = [...STATES, ...[...byState.keys()].filter((state) => !STATES.includes(state))];
    return order.filter((state) => byState.has(state)).map((state) => groupOf(state, byState.get(state)));
  }

  function groupOf(state, members) {
    let group = groups.get(state);
    if (!group) {
      group = { element: make("section", "group"), title: make("h3"), tiles: make("div", "tiles") };
      group.element.append(group.title, group.tiles);
      group.tiles.setAttribute("role", "toolbar");
      groups.set(state, group);
    }
    const workers = members.reduce((sum, node) => sum + node.slots, 0);
    const title = `${GLYPHS[state] || "○"} ${state} – ${many(members.length, "node")}, ${many(workers, "worker")}`;
    group.title.className = `is-${state}`;
    write(group.title, title);
    attribute(group.tiles, "aria-label", `${state}: ${many(members.length, "node")}; move with the arrow keys`);
    arrange(group.tiles, members.map(tileOf));
    // The tab key reaches one of them, the arrow keys reach the others.
    if (!group.tiles.querySelector('[tabindex="0"]')) group.tiles.firstElementChild.tabIndex = 0;
    return group.element;
  }

  function tileOf(node) {
    let tile = tiles.get(node.node_id);
    if (!tile) {
      tile = make("button");
      tile.type = "button";
      tile.tabIndex = -1;
      tile.dataset.node = node.node_id;
      tiles.set(node.node_id, tile);
    } else if (!changed.allNodes && !changed.nodes.has(node.node_id)) {
      attribute(tile, "aria-expanded", String(opened.has(node.node_id)));
      return tile;
    }
    const hasFailed = node.failed.length > 0;
    const className = `tile is-${stateOf(node)}${hasFailed ? " has-failed" : ""}`;
    if (tile.className !== className) tile.className = className;
    const about = `${node.name}, ${stateOf(node)}${hasFailed ? `, ${many(node.failed.length, "failed worker")}` : ""}`;
    write(tile, `${hasFailed ? "✕" : ""}${node.rank >= 0 ? node.rank : node.name}`);
    attribute(tile, "title", about);
    attribute(tile, "aria-label", node.rank >= 0 ? `node ${node.rank}, ${about}` : about);
    attribute(tile, "aria-expanded", String(opened.has(node.node_id)));
    return tile;
  }

  function redrawNodes() {
    changed.allNodes = true;
    schedule();
  }

  nodesBox.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const id = button.closest("[data-node]").dataset.node;
    const node = nodes.get(id);
    if (button.classList.contains("tile")) {
      if (!opened.delete(id)) opened.add(id);
      redrawNodes();
    } else if (node && button.classList.contains("drain")) {
      confirmDrain(node);
    } else if (node && button.classList.contains("worker")) {
      openLog(node, Number(button.dataset.local));
    }
  });

  nodesBox.addEventListener("keydown", (event) => {
    const tile = event.target.closest(".tile");
    if (!tile) return;
    const all = [...tile.parentElement.children];
    const at = all.indexOf(tile);
    const columns = Math.max(1, all.findIndex((each) => each.offsetTop > all[0].offsetTop));
    const moves = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: all.length - 1,
    };
    const next = all[moves[event.key]];
    if (!(event.key in moves)) return;
    event.preventDefault();
    if (!next) return;
    tile.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  $("filter").addEventListener("input", redrawNodes);
  $("states").addEventListener("click", (event) => {
    const chip = event.target.closest("button");
    if (!chip) return;
    onlyState = onlyState === chip.dataset.state ? "" : chip.dataset.state;
    redrawNodes();
  });

  // --- generations -------------------------------------------------------------------------------------------------

  const rows = new Map(); // by number
  const strip = $("strip");
  const generationsList = $("generations");
  let showsAll = false;

  /** The current phase of a generation; empty: it has settled. */
  function spending(entry) {
    if (!entry || entry.settled_at != null || run.phase === "over") return "";
    if (entry.ended_at != null) return "stopping";
    const hung = entry.hangs && entry.hangs.length && entry.hangs[entry.hangs.length - 1][1] == null;
    return hung ? "hung" : entry.running_at == null ? "starting" : "training";
  }

  function spentBy(entry) {
    const spent = {};
    for (const name of SPANS) spent[name] = (entry.spent && entry.spent[`${name}_s`]) || 0;
    const current = spending(entry);
    if (current) spent[current] += Math.max(0, now() - entry.receivedAt);
    return spent;
  }

  function lastGeneration() {
    return generations.size ? generations.get(Math.max(...generations.keys())) : null;
  }

  function drawGenerations() {
    const numbers = [...generations.keys()].sort((one, other) => other - one);
    const shown = showsAll ? numbers : numbers.slice(0, GENERATIONS_SHOWN);
    const list = generationsList;
    for (const number of changed.generations) if (!generations.has(number)) rows.delete(number);
    arrange(list, shown.map((number) => {
      let row = rows.get(number);
      if (!row) {
        row = newRow(number);
        rows.set(number, row);
        fillRow(row, generations.get(number));
      } else if (changed.generations.has(number)) {
        fillRow(row, generations.get(number));
      }
      return row.element;
    }));
    const more = $("more-generations");
    more.hidden = numbers.length <= GENERATIONS_SHOWN;
    write(more, showsAll ? "Show only recent generations" : `Show all ${numbers.length} generations`);
    drawStrip(numbers);
  }

  function newRow(number) {
    const row = { element: make("li"), bar: make("div", "bar"), spans: {}, texts: {} };
    const title = make("div", "title");
    row.state = make("span", "state");
    row.size = make("span", "note");
    row.when = make("span", "note");
    title.append(make("b", "", `Generation ${number}`), row.state, row.size, row.when);
    row.began = make("div", "why");
    row.ended = make("div", "why");
    row.bar.setAttribute("aria-hidden", "true");
    const texts = make("div", "spans");
    for (const name of SPANS) {
      row.spans[name] = make("i", `fill-${name}`);
      row.bar.append(row.spans[name]);
      row.texts[name] = make("span");
      row.texts[name].append(make("span", `swatch fill-${name}`), document.createTextNode(""));
      texts.append(row.texts[name]);
    }
    row.steps = make("span");
    texts.append(row.steps);
    row.element.append(title, row.began, row.ended, row.bar, texts);
    row.element.dataset.number = String(number);
    return row;
  }

  function fillRow(row, entry) {
    row.entry = entry;
    write(row.size, `${many(entry.nodes, "node")}, ${many(entry.workers, "worker")}`);
    write(row.when, `began ${clock(entry.formed_at)}`);
    write(row.began, `Began: ${entry.why}`);
    row.ended.hidden = entry.ended_at == null;
    write(row.ended, entry.ended_at == null ? "" : endOf(entry));
    const steps = entry.last_step >= 0 ? `steps ${count(entry.first_step)}–${count(entry.last_step)}` : "";
    write(row.steps, entry.lost_steps ? `${steps}, ${count(entry.lost_steps)} of them repeated` : steps);
    drawRow(row);
  }

  function endOf(entry) {
    return entry.ended_why ? `Ended: ${entry.ended_why}` : `Ended: ${ENDS[entry.ended_by] || entry.ended_by || "with the run"}`;
  }

  function drawRow(row) {
    const spent = spentBy(row.entry);
    const current = spending(row.entry);
    const isHanging = (current === "training" || current === "hung") && hangs();
    for (const name of SPANS) {
      grow(row.spans[name], spent[name]);
      row.texts[name].hidden = spent[name] <= 0 && current !== name;
      const text = `${name} ${duration(spent[name])}`;
      if (row.texts[name].lastChild.data !== text) row.texts[name].lastChild.data = text;
    }
    const by = row.entry.ended_by;
    const state = isHanging ? "hanging" : current || (by === "failure" || by === "loss" ? "failed" : "done");
    const label = isHanging ? "seems to hang" : current || ENDS[by] || by || "ended";
    const glyph = (!isHanging && { training: "●", starting: "◐", stopping: "◑" }[current]) || GLYPHS[state];
    row.state.className = `state is-${state === "training" ? "working" : state}`;
    write(row.state, `${glyph} ${label}`);
  }

  function grow(element, seconds) {
    const value = String(Math.max(0, Math.round(seconds * 1000)));
    if (element.style.flexGrow !== value) element.style.flexGrow = value;
  }

  function drawStrip(numbers) {
    const pieces = [];
    for (const number of [...numbers].reverse()) {
      const entry = generations.get(number);
      const spent = spentBy(entry);
      const current = spending(entry);
      let isFirst = true;
      for (const name of SPANS) {
        if (spent[name] <= 0 && name !== current) continue;
        const piece = make("i", `fill-${name}${isFirst && pieces.length ? " first" : ""}`);
        piece.title = `generation ${number}: ${name} ${duration(spent[name])}`;
        piece.dataset.of = `${number} ${name}`;
        grow(piece, spent[name]);
        pieces.push(piece);
        isFirst = false;
      }
    }
    const waiting = make("i", "fill-waiting");
    waiting.dataset.of = "waiting";
    strip.replaceChildren(...pieces, waiting);
    const first = numbers.length ? generations.get(numbers[numbers.length - 1]) : null;
    let text = first ? `Since ${clock(first.formed_at)}; each line marks the start of a generation.` : "No generation yet.";
    if (run.generations_forgotten) text += ` Not shown: ${many(run.generations_forgotten, "earlier generation")}.`;
    write($("strip-note"), text);
  }

  function drawCurrentGeneration() {
    const entry = lastGeneration();
    const current = spending(entry);
    const row = entry && rows.get(entry.number);
    if (row && current) {
      drawRow(row);
      const piece = strip.querySelector(`[data-of="${entry.number} ${current}"]`);
      if (piece) grow(piece, spentBy(entry)[current]);
    }
    const waiting = strip.lastElementChild;
    if (waiting) grow(waiting, entry && entry.settled_at != null && run.phase !== "over" ? now() - entry.settled_at : 0);
  }

  $("more-generations").addEventListener("click", () => {
    showsAll = !showsAll;
    drawGenerations();
  });

  // --- the ledger --------------------------------------------------------------------------------------------------

  const ledgerRows = new Map();
  for (const [name, label] of SPENT) {
    const row = make("tr");
    const head = make("th");
    head.scope = "row";
    head.append(make("span", `swatch fill-${name}`), document.createTextNode(label));
    const time = make("td", "", "–");
    const share = make("td", "", "–");
    row.append(head, time, share);
    $("ledger").append(row);
    const piece = make("i", `fill-${name}`);
    $("ledger-bar").append(piece);
    ledgerRows.set(name, { time, share, piece });
  }

  function spentByAll() {
    const spent = {};
    for (const [name] of SPENT) spent[name] = (goodput.spent && goodput.spent[`${name}_s`]) || 0;
    const entry = lastGeneration();
    const current = run.phase === "over" || !(entry || nodes.size) ? "" : spending(entry) || "waiting";
    if (current) spent[current] += Math.max(0, now() - knownAt);
    return spent;
  }

  function drawLedger() {
    const spent = spentByAll();
    let total = 0;
    for (const [name] of SPENT) total += spent[name];
    for (const [name] of SPENT) {
      const row = ledgerRows.get(name);
      write(row.time, duration(spent[name]));
      write(row.share, percent(spent[name], total));
      grow(row.piece, spent[name]);
    }
    const ratio = total > 0 ? percent(spent.training, total) : "–";
    write($("ettr"), ratio);
    fact("fact-ettr", ratio, total > 0 ? ` of ${duration(total, false)}` : "");
    write($("ettr-of"), "effective training time ratio");
    mean("to-detect", goodput.to_detect);
    mean("to-recover", goodput.to_recover);
    write($("lost-steps"), count(goodput.lost_steps || 0));
    write($("survivors"), count(goodput.survivors || 0));
  }

  function mean(id, value) {
    const number = (value && value.count) || 0;
    const text = number ? brief(value.sum_s / number) : "–";
    write($(id), number > 1 ? `${text}, mean of ${number}` : text);
  }

  function leftText(node) {
    const how = node.state === "left" ? "left" : `was ${node.state}`;
    return `${node.name} ${how} at ${clock(node.since)}${node.why ? `: ${node.why}` : ""}`;
  }

  // --- failures ----------------------------------------------------------------------------------------------------

  function drawFailures() {
    const section = $("failure");
    const isNow = failures.length > 0;
    section.hidden = !isNow && !earlier.length;
    if (section.hidden) return;
    const open = new Set([...section.querySelectorAll("details[open]")].map((each) => each.dataset.of));
    section.classList.toggle("is-past", !isNow);
    // Which failure is the first cause was decided once, by the coordinator. "first" is the default and is not sent.
    const withRole = (role) => failures.filter((each) => (each.role || "first") === role);
    const first = isNow ? withRole("first")[0] : earlier[earlier.length - 1];
    const title = first ? "Failure" : "Nodes came or went";
    write($("failure-title"), isNow ? title : `Last failure (generation ${first.generation}, restarted)`);
    const parts = first ? [failureParts(first)] : [];
    if (isNow) {
      parts.push(folded("same", withRole("same"), "failed for the same reason"));
      parts.push(folded("others", withRole("independent"), "failed independently"));
      parts.push(folded("consequences", withRole("consequence"), "failed as a consequence"));
    }
    $("failure-now").replaceChildren(...parts.filter(Boolean));
    const before = isNow ? [...earlier].reverse() : earlier.slice(0, -1).reverse();
    $("earlier").hidden = !before.length;
    write($("earlier-title"), `${many(before.length, "earlier failure")}`);
    $("earlier-list").replaceChildren(...before.map(failureLine));
    for (const each of section.querySelectorAll("details[data-of]")) each.open = open.has(each.dataset.of);
  }

  function failureParts(failure) {
    const part = make("div");
    const what = make("p", "what");
    if (failure.cause) what.append(make("span", "kind", failure.cause.replaceAll("_", " ")));
    what.append(document.createTextNode(failure.what));
    part.append(what, make("p", "where", whereOf(failure)));
    if (failure.is_consequence) part.append(make("p", "where", "The cause is unknown: this worker only lost a peer or timed out."));
    else if (failure.meaning) part.append(make("p", "where", failure.meaning));
    if (failure.next_step) part.append(make("p", "where", `Next: ${failure.next_step}`));
    if (failure.traceback) {
      const details = make("details");
      details.dataset.of = `traceback ${failure.generation} ${failure.rank}`;
      details.append(make("summary", "", "Traceback"), make("pre", "", harmlessLines(failure.traceback)));
      part.append(details);
    } else if (failure.last_lines) part.append(make("pre", "", harmlessLines(failure.last_lines.join("\n"))));
    if (failure.stacks) part.append(make("pre", "", harmlessLines(failure.stacks)));
    if (failure.log_file) part.append(make("p", "where", `Log: ${failure.log_file}`));
    return part;
  }

  const harmlessLines = (text) => text.split("\n").map(harmless).join("\n");

  function whereOf(failure) {
    return `rank ${failure.rank} (local rank ${failure.local_rank}) on ${failure.host}, generation ${failure.generation}, at ${clock(failure.at)}`;
  }

  function failureLine(failure) {
    const line = make("li");
    if (failure.cause) line.append(make("span", "kind", failure.cause.replaceAll("_", " ")));
    line.append(document.createTextNode(failure.what), make("div", "where", whereOf(failure)));
    return line;
  }

  function folded(name, list, what) {
    if (!list.length) return null;
    const details = make("details");
    details.dataset.of = name;
    const items = make("ol", "plain");
    items.append(...list.map(failureLine));
    details.append(make("summary", "", `${many(list.length, "worker")} ${what}`), items);
    return details;
  }

  // --- events ------------------------------------------------------------------------------------------------------

  const eventsList = $("events");

  function drawEvents() {
    const isFirst = !eventsList.children.length;
    const list = document.createDocumentFragment();
    for (const event of changed.events.slice(-MAX_EVENTS).reverse()) {
      const line = make("li", isFirst ? "" : "fresh");
      line.dataset.at = String(event.at);
      const time = make("time", "", clock(event.at));
      time.dateTime = new Date(event.at * 1000).toISOString();
      line.append(time, make("span", "", event.text));
      list.append(line);
    }
    eventsList.prepend(list);
    while (eventsList.children.length > MAX_EVENTS) eventsList.lastElementChild.remove();
  }

  // --- announcements for screen readers ----------------------------------------------------------------------------

  let announcement = "";
  let announceTimer = 0;

  /** Announce only the last message of two seconds, so that many changes become one announcement. */
  function announce(text) {
    announcement = text;
    if (announceTimer) return;
    announceTimer = setTimeout(() => {
      announceTimer = 0;
      write($("announcer"), announcement);
    }, 2000);
  }

  function announceChange(before) {
    if (hangs() && !before.hangs) return announce(hangText());
    if (before.phase === run.phase && before.generation === run.generation) return;
    if (run.phase === "over") announce(endText());
    else if (run.phase === "running") announce(`Generation ${run.generation} has formed, with ${many(run.world_size, "worker")}.`);
    else if (run.phase === "ending" && failures.length) announce(`Generation ${run.generation} failed: ${failures[0].what}`);
    else announce(`${PHASES[run.phase] || run.phase}.`);
  }

  const endText = () => `The run ${OUTCOMES[run.outcome] || "ended"}.`;

  // --- confirmation ------------------------------------------------------------------------------------------------

  const dialog = $("ask");
  let action = null;

  function confirmAction(title, paragraphs, yes, what) {
    action = what;
    write($("ask-title"), title);
    $("ask-text").replaceChildren(...paragraphs.map((each) => make("p", "", each)));
    $("ask-answer").hidden = true;
    write($("ask-answer"), "");
    write($("ask-yes"), yes);
    $("ask-yes").hidden = false;
    $("ask-yes").disabled = false;
    write($("ask-no"), "Cancel");
    dialog.showModal();
    $("ask-no").focus();
  }

  function confirmDrain(node) {
    const rest = nodes.size - 1;
    const others = rest === 1 ? "The other node continues" : `The other ${many(rest, "node")} continue`;
    const after = rest >= run.min_nodes
      ? `${others} in a new generation: all workers are restarted.`
      : `That leaves ${many(rest, "node")}, but the run needs ${run.min_nodes}: it waits for another node, and ends if none joins in time.`;
    confirmAction(`Drain ${node.name}?`, [
      `${node.name} (${many(node.slots, "worker")}) leaves the run. Its workers get SIGTERM and the grace period to exit.`,
      node.rank >= 0 ? after : "It is not a member of the current generation, so other nodes are not affected.",
      "This does not use up a restart.",
    ], "Drain this node", { do: "drain", node: node.node_id });
  }

  $("restart").addEventListener("click", () => {
    confirmAction("Restart all workers?", [
      `Generation ${run.generation} ends on ${many(nodes.size, "node")}: ${many(run.world_size, "worker")} are stopped and started again.`,
      "Unsaved work is lost. This does not use up a restart: " +
        `${run.restarts_used} of ${run.max_restarts} are used.`,
    ], "Restart all workers", { do: "restart" });
  });

  $("stop").addEventListener("click", () => {
    confirmAction(`Stop the run ${run.run_id}?`, [
      `The run ends on ${many(nodes.size, "node")}: workers get SIGTERM and the grace period to exit, then every agent exits.`,
      "The run cannot be resumed. Every agent exits with a code other than 0.",
    ], "Stop the run", { do: "stop" });
  });

  $("ask-no").addEventListener("click", () => dialog.close());
  $("ask-yes").addEventListener("click", async () => {
    $("ask-yes").disabled = true;
    const answer = await request("do", { method: "POST", body: JSON.stringify(action) });
    if (!dialog.open) return;
    $("ask-answer").hidden = false;
    write($("ask-answer"), answer.error ? `Rejected: ${answer.error}` : `Done: ${answer.value}.`);
    $("ask-yes").hidden = true;
    write($("ask-no"), "Close");
    $("ask-no").focus();
  });

  /** Return the answer: a value, or an error message. Throws only if the request was aborted. */
  async function request(where, options = {}) {
    let response;
    try {
      response = await fetch(where, { ...options, headers: { "X-Tenax-Key": KEY }, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return { error: "could not reach the agent that serves this page", isGone: true };
    }
    const text = await response.text();
    try {
      return JSON.parse(text);
    } catch {
      return { error: text.trim() || `HTTP status ${response.status}` };
    }
  }

  // --- logs --------------------------------------------------------------------------------------------------------

  let log = null; // the worker whose log is shown

  function openLog(node, local) {
    closeLog();
    log = { node: node.node_id, local, name: node.name, rank: node.first_rank + local, cursor: "", generation: 0, control: new AbortController() };
    $("log").hidden = false;
    document.body.classList.add("has-log");
    write($("log-title"), node.first_rank >= 0 ? `Log of rank ${log.rank}, on ${node.name}` : `Log of worker ${local} on ${node.name}`);
    $("log-lines").replaceChildren();
    $("log-title").focus({ preventScroll: true });
    redrawNodes();
    follow(log);
  }

  function closeLog() {
    if (!log) return;
    log.control.abort();
    const button = nodesBox.querySelector(`[data-node="${CSS.escape(log.node)}"] [data-local="${log.local}"]`);
    log = null;
    $("log").hidden = true;
    document.body.classList.remove("has-log");
    if (button) button.focus({ preventScroll: true });
    redrawNodes();
  }

  async function follow(mine) {
    try {
      while (log === mine) {
        const began = performance.now();
        const query = new URLSearchParams({
          node: mine.node, local_rank: mine.local, stream: $("log-stream").value, last: 200,
          ...(mine.cursor ? { cursor: mine.cursor, wait_s: 20 } : {}),
        });
        const answer = await request(`logs?${query}`, { signal: mine.control.signal });
        if (log !== mine) return;
        if (answer.error) {
          write($("log-state"), `${answer.error}.`);
          await pause(mine, isLive ? 3000 : 500);
          if (answer.isGone) await until(mine, () => isLive);
          continue;
        }
        const value = answer.value;
        showLines(mine, value);
        mine.cursor = value.cursor;
        if (value.is_over && !value.is_more) {
          write($("log-state"), "End of the log.");
          await until(mine, () => nodes.has(mine.node) && run.generation > (value.generation || 0));
          continue;
        }
        write($("log-state"), $("log-follow").checked ? "Following." : "Paused.");
        await until(mine, () => $("log-follow").checked);
        if (!value.is_more && !value.lines.length && performance.now() - began < 300) await pause(mine, 1000);
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
  }

  const pause = (mine, ms) => new Promise((done) => {
    const timer = setTimeout(done, ms);
    mine.control.signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
  });

  async function until(mine, condition) {
    while (log === mine && !condition()) await pause(mine, 500);
  }

  function showLines(mine, value) {
    const box = $("log-lines");
    const list = document.createDocumentFragment();
    const addNote = (text) => list.append(make("div", "meta", text));
    for (const gap of value.left_out || []) {
      addNote(`[${gap.bytes ? `${count(gap.bytes)} bytes` : "some bytes"} of ${gap.stream} ${gap.why}]`);
    }
    for (const line of value.lines) {
      if (line.generation !== mine.generation) {
        mine.generation = line.generation;
        addNote(`[generation ${line.generation}, rank ${line.rank}]`);
      }
      const element = make("div", line.stream, harmless(line.text));
      if (line.at) element.title = `${line.stream}, ${clock(line.at)}`;
      list.append(element);
    }
    if (!list.childElementCount) return;
    box.append(list);
    for (let extra = box.childElementCount - MAX_LINES; extra > 0; extra -= 1) box.firstElementChild.remove();
    if ($("log-follow").checked) box.scrollTop = box.scrollHeight;
  }

  $("log-close").addEventListener("click", closeLog);
  $("log").addEventListener("keydown", (event) => { if (event.key === "Escape") closeLog(); });
  $("log-follow").addEventListener("change", () => {
    if ($("log-follow").checked) $("log-lines").scrollTop = $("log-lines").scrollHeight;
  });
  $("log-stream").addEventListener("change", () => {
    if (!log) return;
    log.control.abort();
    log = { ...log, cursor: "", generation: 0, control: new AbortController() };
    $("log-lines").replaceChildren();
    follow(log);
  });

  // --- the stream --------------------------------------------------------------------------------------------------

  let source = null;
  let silence = 0;
  let retry = 0;
  let lostAt = 0;
  let tries = 0;

  function connect() {
    clearTimeout(retry);
    if (source) source.close();
    source = new EventSource(`events?key=${encodeURIComponent(KEY)}`);
    source.addEventListener("whole", (event) => {
      setLive();
      takeWhole(JSON.parse(event.data));
    });
    source.addEventListener("change", (event) => {
      resetSilence();
      takeChange(JSON.parse(event.data));
    });
    source.addEventListener("heartbeat", resetSilence);
    source.addEventListener("closed", () => lose("closed"));
    // Closed by the browser: the answer was not a stream, and retrying would not change that.
    source.addEventListener("error", (event) => lose(event.target.readyState === EventSource.CLOSED ? "rejected" : ""));
    resetSilence();
  }

  function resetSilence() {
    clearTimeout(silence);
    silence = setTimeout(() => lose(""), SILENT_MS);
  }

  function setLive() {
    isLive = true;
    lostAt = 0;
    tries = 0;
    resetSilence();
    $("notice").hidden = true;
    showConnection("live", "live");
  }

  function showConnection(is, text) {
    $("connection").dataset.is = is;
    write($("connection"), text);
  }

  function lose(how) {
    clearTimeout(silence);
    clearTimeout(retry);
    if (source) source.close();
    source = null;
    if (run !== null && isLive) freeze();
    isLive = false;
    if (run !== null) { changed.run = changed.allNodes = true; schedule(); }
    if (run !== null && run.phase === "over") {
      showConnection("over", "run ended");
      notice(`${endText()} This page shows its last state.`, false);
      return;
    }
    lostAt = lostAt || Date.now();
    if (how === "rejected" || Date.now() - lostAt > GIVE_UP_MS) {
      giveUp();
      return;
    }
    showConnection("lost", "connection lost, retrying");
    if (how === "closed") {
      notice("The agent that served this page closed it. If another agent serves the run now, it printed a new link.", true);
    }
    tries += 1;
    retry = setTimeout(connect, Math.min(8000, 250 * 2 ** tries));
  }

  /** Keep the durations computed so far. */
  function freeze() {
    const at = now();
    const kept = (spent) => Object.fromEntries(Object.entries(spent).map(([name, seconds]) => [`${name}_s`, seconds]));
    for (const entry of generations.values()) {
      if (spending(entry)) Object.assign(entry, { spent: kept(spentBy(entry)), receivedAt: at });
    }
    goodput = { ...goodput, spent: kept(spentByAll()) };
    knownAt = at;
  }

  async function giveUp() {
    showConnection("lost", "not connected");
    const why = await rejection();
    const what = why ? `The server rejected this page: ${why}` : "Could not reach the agent that serves this page: it exited, or the network is down";
    const shown = run === null ? "" : ` This page shows the state at ${clock(knownAt)}.`;
    notice(`${what.replace(/\.$/, "")}.${shown}`, true);
  }

  /** Return the server's message if it rejects the stream; empty if it does not answer. */
  async function rejection() {
    const control = new AbortController();
    try {
      const answer = await fetch("events", { headers: { "X-Tenax-Key": KEY }, cache: "no-store", signal: control.signal });
      const text = answer.ok ? "too many pages were open; reconnect now" : (await answer.text()).trim();
      control.abort();
      return text;
    } catch {
      return "";
    }
  }

  function notice(text, canConnect) {
    $("notice").hidden = false;
    write($("notice-text"), text);
    $("reconnect").hidden = !canConnect;
    announce(text);
  }

  $("reconnect").addEventListener("click", () => {
    lostAt = 0;
    tries = 0;
    showConnection("", "connecting");
    connect();
  });

  setInterval(() => { if (isLive && !document.hidden) drawTimes(); }, 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) drawTimes(); });
  connect();
})();
