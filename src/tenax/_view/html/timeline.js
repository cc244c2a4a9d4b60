// Lanes on a canvas that can be zoomed and moved, by keyboard too. Only visible lanes are drawn, so thousands of lanes
// cost no more than one screen. Without JavaScript the page still has its strip and tables.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("lanes-data").textContent);
  const box = document.getElementById("lanes"), description = document.getElementById("description");
  const withWorkers = document.getElementById("with-workers");
  const canvas = document.createElement("canvas"), spacer = document.createElement("div");
  const LANE = 22, AXIS = 24, LEAST = 0.0005;
  let colours = {}, lanes = [], from = 0, to = Math.max(data.span, LEAST), width = 0, height = 0, names = 120;
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Lanes of the run, its nodes and workers. Arrow keys move, plus and minus zoom, " +
    "zero shows everything. The tables below contain the same data as text.");
  box.append(canvas, spacer);

  const formatDuration = (seconds) => {
    if (seconds < 0.9995) return Math.round(seconds * 1000) + " ms";
    if (seconds < 9.95) return Math.round(seconds * 10) / 10 + " s";
    if (seconds < 59.5) return Math.round(seconds) + " s";
    const two = (n, per, unit, small) =>
      Math.floor(n / per) + " " + unit + (n % per ? " " + (n % per) + " " + small : "");
    if (seconds < 3599.5) return two(Math.round(seconds), 60, "min", "s");
    if (seconds < 86370) return two(Math.round(seconds / 60), 60, "h", "min");
    return two(Math.round(seconds / 3600), 24, "d", "h");
  };
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["bg", "fg", "muted", "line", "card", "waiting", "starting", "training", "stopping", "hung", "lost",
      "draining", "done", "idle", "failed"]) {
      colours[name] = style.getPropertyValue("--" + name).trim();
      colours["on-" + name] = style.getPropertyValue("--on-" + name).trim() || colours.fg;
    }
  };
  const choose = () => { lanes = data.lanes.filter((lane) => !lane.w || withWorkers.checked); };
  const size = () => {
    width = box.clientWidth;
    names = width < 520 ? 84 : 150;
    height = Math.min(lanes.length * LANE + AXIS + 2, Math.round(innerHeight * 0.72) - 2);
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    spacer.style.height = Math.max(0, lanes.length * LANE + AXIS + 2 - height) + "px";
  };
  const x = (t) => names + (t - from) / (to - from) * (width - names);
  const time = (px) => from + (px - names) / (width - names) * (to - from);

  const cut = (pen, text, room) => {
    if (pen.measureText(text).width <= room) return text;
    let n = text.length;
    while (n > 1 && pen.measureText(text.slice(0, n) + "…").width > room) n--;
    return n > 1 ? text.slice(0, n) + "…" : "";
  };
  const drawAxis = (pen) => {
    const steps = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200,
      86400, 172800, 604800];
    const wanted = (to - from) / Math.max(2, (width - names) / 90);
    const step = steps.find((each) => each >= wanted) || 2592000;
    pen.fillStyle = colours.bg;
    pen.fillRect(0, 0, width, AXIS);
    pen.fillStyle = colours.muted;
    pen.strokeStyle = colours.line;
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      pen.beginPath();
      pen.moveTo(x(t), AXIS);
      pen.lineTo(x(t), height);
      pen.stroke();
      const text = t < step / 2 ? "0" : formatDuration(t), wide = pen.measureText(text).width;
      pen.fillText(text, Math.max(names + 2, Math.min(x(t) - wide / 2, width - wide - 2)), AXIS / 2);
    }
  };
  const drawSpan = (pen, span, top) => {
    const [kind, since, until, text] = span;
    const left = Math.max(names, x(since)), right = Math.min(width, x(until));
    if (right < names || left > width) return;
    const room = Math.max(1, right - left);
    pen.fillStyle = colours[kind] || colours.idle;
    pen.fillRect(left, top + 3, room, LANE - 6);
    if (kind === "lost" || kind === "hung" || kind === "failed") {  // not by colour alone
      pen.save();
      pen.beginPath();
      pen.rect(left, top + 3, room, LANE - 6);
      pen.clip();
      pen.strokeStyle = colours.bg;
      pen.globalAlpha = 0.35;
      pen.beginPath();
      for (let at = left - LANE; at < right; at += 7) { pen.moveTo(at, top + LANE); pen.lineTo(at + LANE, top); }
      pen.stroke();
      pen.restore();
    }
    if (room > 34) {
      pen.fillStyle = colours["on-" + kind] || colours.fg;
      pen.fillText(cut(pen, text, room - 10), left + 5, top + LANE / 2);
    }
  };
  let waits = false;
  const draw = () => { if (!waits) { waits = true; requestAnimationFrame(drawNow); } };
  const drawNow = () => {
    waits = false;
    const pen = canvas.getContext("2d"), scrolled = box.scrollTop;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.fillStyle = colours.bg;
    pen.fillRect(0, 0, width, height);
    const first = Math.floor(scrolled / LANE), last = Math.min(lanes.length, first + Math.ceil(height / LANE) + 1);
    drawAxis(pen);
    for (let n = first; n < last; n++) {
      const lane = lanes[n], top = AXIS + n * LANE - scrolled;
      for (const span of lane.s) drawSpan(pen, span, top);
      pen.fillStyle = colours.failed;
      for (const [at] of lane.f || []) {
        const px = x(at);
        if (px < names - 1 || px > width + 1) continue;
        pen.beginPath();
        pen.moveTo(px - 5, top + 1);
        pen.lineTo(px + 5, top + 1);
        pen.lineTo(px, top + 11);
        pen.closePath();
        pen.fill();
        pen.strokeStyle = colours.bg;
        pen.stroke();
      }
      pen.fillStyle = colours.bg;
      pen.fillRect(0, top, names, LANE);
      pen.fillStyle = lane.w ? colours.muted : colours.fg;
      pen.fillText(cut(pen, lane.n, names - (lane.w ? 20 : 10)), lane.w ? 14 : 4, top + LANE / 2);
    }
    pen.fillStyle = colours.bg;  // the axis stays on top of lanes that were scrolled under it
    pen.fillRect(0, 0, names, AXIS);
    if (scrolled > 0) drawAxis(pen);
  };

  const show = (a, b) => {
    const span = Math.min(Math.max(b - a, LEAST), data.span || LEAST);
    from = Math.max(0, Math.min(a, (data.span || LEAST) - span));
    to = from + span;
    draw();
  };
  const zoom = (by, at = (from + to) / 2) => show(at - (at - from) * by, at + (to - at) * by);
  const move = (by) => show(from + (to - from) * by, to + (to - from) * by);
  const all = () => show(0, data.span);

  const under = (event) => {
    const bounds = canvas.getBoundingClientRect();
    const px = event.clientX - bounds.left, py = event.clientY - bounds.top;
    const lane = lanes[Math.floor((py - AXIS + box.scrollTop) / LANE)];
    if (!lane || py < AXIS || px < names) return "";
    const t = time(px), near = (to - from) / (width - names) * 6;
    const mark = (lane.f || []).find(([at]) => Math.abs(at - t) <= near);
    if (mark) return lane.n + ", after " + formatDuration(mark[0]) + ": " + mark[1];
    const span = lane.s.find(([, since, until]) => since <= t && t <= until) ||
      lane.s.find(([, since, until]) => since - near <= t && t <= until + near);
    if (!span) return "";
    const lasted = formatDuration(span[2] - span[1]);
    return lane.n + ": " + span[3] + ", after " + formatDuration(span[1]) + ", for " + lasted;
  };
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { px: event.clientX, from, to };
    canvas.setPointerCapture(event.pointerId);
    canvas.style.cursor = "grabbing";
    description.textContent = under(event) || description.textContent;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held) {
      const by = (held.px - event.clientX) / (width - names) * (held.to - held.from);
      show(held.from + by, held.to + by);
    } else {
      const text = under(event);
      canvas.title = text;
      if (text) description.textContent = text;
    }
  });
  for (const name of ["pointerup", "pointercancel"])
    canvas.addEventListener(name, () => { held = null; canvas.style.cursor = "grab"; });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, time(event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) {
      event.preventDefault();
      const by = (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8;
      zoom(by, time(event.clientX - canvas.getBoundingClientRect().left));
    }
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), "0": all,
      ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
      ArrowUp: () => { box.scrollTop -= LANE; }, ArrowDown: () => { box.scrollTop += LANE; } }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  document.getElementById("zoom-in").onclick = () => zoom(0.6);
  document.getElementById("zoom-out").onclick = () => zoom(1.6);
  document.getElementById("zoom-all").onclick = all;
  const again = () => { readColours(); choose(); size(); draw(); };
  withWorkers.onchange = again;
  box.addEventListener("scroll", draw);
  addEventListener("resize", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  again();
})();
