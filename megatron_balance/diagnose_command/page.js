"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const ALL = -1;
  let shown = ALL; // place of the step in data.steps
  let cursor = null; // worker of the heatmap under the keyboard
  const timelineSteps = Object.keys(data.timelines).map(Number);
  const SHORT = 1e-3;

  // --- drawing

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["ink", "faint", "line", "card", "forward", "backward", "once", "idle", "bad", "ideal", "focus"];
    return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  }

  function surface(canvas, height) {
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(canvas.clientWidth, 240);
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    return { pen, width, height };
  }

  function rgb(hex) {
    return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
  }

  function blend(from, to, part) {
    const [a, b] = [rgb(from), rgb(to)];
    return "rgb(" + a.map((each, place) => Math.round(each + (b[place] - each) * part)).join(",") + ")";
  }

  function write(pen, text, x, y, colour, align = "left") {
    pen.fillStyle = colour;
    pen.textAlign = align;
    pen.fillText(text, x, y);
  }

  function ticks(most, wanted) {
    const raw = most / wanted;
    const power = Math.pow(10, Math.floor(Math.log10(raw)));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
    const places = [];
    for (let at = 0; at <= most * (1 + 1e-9); at += step) places.push(at);
    return places;
  }

  function secondsText(value) {
    if (value === null || !isFinite(value)) return "-";
    return value >= 1 ? value.toPrecision(4) + " s" : (1e3 * value).toPrecision(value < SHORT ? 2 : 4) + " ms";
  }

  const tickText = (value) => Number(value.toPrecision(6)) + " s";
  const ratioText = (value) => (value === null ? "-" : value.toFixed(3));

  // --- workers

  const values = () => (shown === ALL ? data.workers : data.by_step[shown]);

  function most() {
    const rows = shown === ALL ? [data.workers] : data.by_step;
    let highest = data.least_darkest;
    for (const row of rows) for (const value of row) if (value > highest) highest = value;
    return highest;
  }

  const grid = { left: 52, top: 6, width: 1, height: 1, gap: 1 };

  function drawHeatmap() {
    const c = colours();
    const canvas = find("heatmap");
    grid.height = Math.min(40, Math.max(9, 360 / data.pp));
    const { pen, width, height } = surface(canvas, grid.height * data.pp + 48);
    grid.width = Math.min(110, (width - grid.left - 92) / data.dp);
    grid.gap = grid.width > 6 ? 1 : 0;
    const row = values();
    const top = most();
    for (let pp = 0; pp < data.pp; pp++) {
      for (let dp = 0; dp < data.dp; dp++) {
        const value = row[pp * data.dp + dp];
        const part = Math.min(1, Math.max(0, (value - 1) / (top - 1)));
        const [x, y] = [grid.left + dp * grid.width, grid.top + pp * grid.height];
        pen.fillStyle = value === null ? c.card : blend(c.idle, c.bad, part);
        pen.fillRect(x, y, grid.width - grid.gap + (grid.gap ? 0 : 0.5), grid.height - 1);
        if (grid.width >= 40 && grid.height >= 16) {
          const light = rgb(c.card)[0] > 128;
          const word = value === null ? "-" : value.toFixed(2);
          write(pen, word, x + grid.width / 2, y + grid.height / 2, light && part > 0.5 ? c.card : part > 0.5 ? "#14171c" : c.ink, "center");
        }
      }
    }
    const every = Math.max(1, Math.ceil(data.pp / 20));
    for (let pp = 0; pp < data.pp; pp += every) {
      write(pen, "PP " + pp, grid.left - 8, grid.top + (pp + 0.5) * grid.height, c.faint, "right");
    }
    const apart = Math.max(1, Math.ceil(34 / grid.width));
    for (let dp = 0; dp < data.dp; dp += apart) {
      write(pen, String(dp), grid.left + (dp + 0.5) * grid.width, height - 32, c.faint, "center");
    }
    write(pen, "DP rank", grid.left, height - 12, c.faint);
    drawScale(pen, c, grid.left + data.dp * grid.width + 18, Math.max(40, grid.height * data.pp), top);
    if (cursor !== null) {
      pen.strokeStyle = c.focus;
      pen.lineWidth = 2;
      pen.strokeRect(grid.left + cursor[1] * grid.width, grid.top + cursor[0] * grid.height, grid.width, grid.height);
    }
  }

  function drawScale(pen, c, x, height, top) {
    for (let place = 0; place < height; place++) {
      pen.fillStyle = blend(c.idle, c.bad, 1 - place / height);
      pen.fillRect(x, grid.top + place, 14, 1.5);
    }
    write(pen, top.toFixed(2), x + 20, grid.top + 6, c.faint);
    write(pen, "1.00", x + 20, grid.top + height - 6, c.faint);
  }

  function workerFacts(pp, dp) {
    const text = "DP rank " + dp + ", PP rank " + pp + ": slowdown " + ratioText(values()[pp * data.dp + dp]) + stepName();
    find("worker-facts").textContent = text;
    return text;
  }

  const stepName = () => (shown === ALL ? " over all steps" : " in step " + data.steps[shown]);

  // --- steps

  const plot = { left: 58, right: 12, top: 8, bottom: 26 };

  function stepBars(width) {
    return (width - plot.left - plot.right) / data.steps.length;
  }

  function drawSteps() {
    const c = colours();
    const { pen, width, height } = surface(find("steps"), 170);
    let highest = 0; // of any number of steps: they are too many for the arguments of a function
    for (const values of [data.actual, data.ideal]) for (const value of values) if (value > highest) highest = value;
    highest *= 1.05;
    const bar = stepBars(width);
    const y = (value) => height - plot.bottom - (value / highest) * (height - plot.top - plot.bottom);
    for (const at of ticks(highest, 4)) {
      pen.fillStyle = c.line;
      pen.fillRect(plot.left, y(at), width - plot.left - plot.right, 1);
      write(pen, tickText(at), plot.left - 6, y(at), c.faint, "right");
    }
    data.actual.forEach((value, place) => {
      const x = plot.left + place * bar;
      pen.fillStyle = place === shown ? c.focus : c.faint;
      pen.fillRect(x + bar * 0.1, y(value), Math.max(1, Math.min(bar * 0.8, 44)), y(0) - y(value));
      pen.fillStyle = c.ideal;
      pen.fillRect(x + bar * 0.1, y(data.ideal[place]) - 1.5, Math.max(1, Math.min(bar * 0.8, 44)), 3);
    });
    const apart = Math.max(1, Math.ceil(46 / bar));
    for (let place = 0; place < data.steps.length; place += apart) {
      write(pen, String(data.steps[place]), plot.left + place * bar + Math.min(bar * 0.5, 26), height - 12, c.faint, "center");
    }
  }

  // --- timelines

  const lanes = { left: 58, right: 12, bars: [], scale: 1 };

  function drawTimeline() {
    const c = colours();
    const one = data.timelines[find("timeline-step").value];
    if (!one) return;
    const place = Number(find("rank").value);
    const rows = data.pp;
    const lane = Math.min(26, Math.max(5, 420 / rows));
    const block = rows * lane + 26;
    const { pen, width, height } = surface(find("timeline"), 2 * block + 24);
    const longest = Math.max(...["real", "ideal"].map((name) => one[name + "_s"]));
    const scale = (width - lanes.left - lanes.right) / (longest || 1);
    Object.assign(lanes, { bars: [], scale });
    ["real", "ideal"].forEach((name, group) => {
      const top = group * block;
      const words = name === "real" ? "as recorded" : "if nothing straggled";
      write(pen, words + ": " + secondsText(one[name + "_s"]), lanes.left, top + 11, c.ink);
      one[name][place].forEach((row, pp) => drawLane(pen, c, row, top + 22 + pp * lane, lane, pp, one[name + "_s"]));
      pen.fillStyle = c.ink;
      pen.fillRect(lanes.left + one[name + "_s"] * scale, top + 20, 1.5, rows * lane + 2);
    });
    for (const at of ticks(longest, 6)) write(pen, tickText(at), lanes.left + at * scale, height - 10, c.faint, at ? "center" : "left");
    find("timeline-facts").textContent =
      secondsText(one.real_s) + " recorded, " + secondsText(one.ideal_s) + " ideal: " + (one.real_s / one.ideal_s).toFixed(3) + " times";
  }

  function drawLane(pen, c, row, top, lane, pp, end) {
    const fills = [c.forward, c.backward, c.once];
    pen.fillStyle = c.idle;
    pen.fillRect(lanes.left, top, end * lanes.scale, lane - 2);
    if (lane >= 9 || pp % 4 === 0) write(pen, "PP " + pp, lanes.left - 8, top + lane / 2, c.faint, "right");
    for (let at = 0; at < row.length; at += 4) {
      const [kind, microbatch, start, length] = row.slice(at, at + 4);
      const [x, wide] = [lanes.left + start * 1e-6 * lanes.scale, Math.max(0.4, length * 1e-6 * lanes.scale)];
      const group = data.groups[kind];
      pen.fillStyle = fills[group];
      pen.fillRect(x, top, wide > 3 ? wide - 0.6 : wide, lane - 2);
      if (wide > 18 && lane >= 14 && microbatch >= 0) write(pen, String(microbatch), x + wide / 2, top + lane / 2 - 1, group === 1 ? "#14171c" : c.card, "center");
      lanes.bars.push([x, top, wide, lane, kind, microbatch, length, pp]);
    }
  }

  // --- what the user does

  const tip = find("tip");

  function tell(event, text) {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 300) + "px";
    tip.style.top = event.clientY + 16 + "px";
  }

  function pointed(event) {
    const box = event.currentTarget.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  find("heatmap").addEventListener("mousemove", (event) => {
    const [x, y] = pointed(event);
    const [dp, pp] = [Math.floor((x - grid.left) / grid.width), Math.floor((y - grid.top) / grid.height)];
    const inside = dp >= 0 && dp < data.dp && pp >= 0 && pp < data.pp;
    tell(event, inside ? workerFacts(pp, dp) : "");
  });

  find("heatmap").addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const [pp, dp] = cursor === null ? [0, 0] : [cursor[0] + move[0], cursor[1] + move[1]];
    cursor = [Math.min(data.pp - 1, Math.max(0, pp)), Math.min(data.dp - 1, Math.max(0, dp))];
    workerFacts(...cursor);
    drawHeatmap();
  });

  find("timeline").addEventListener("mousemove", (event) => {
    const [x, y] = pointed(event);
    const bar = lanes.bars.find(([left, top, wide, lane]) => x >= left && x <= left + wide && y >= top && y <= top + lane);
    if (!bar) return tell(event, "");
    const [, , , , kind, microbatch, length, pp] = bar;
    const text = data.kinds[kind] + (microbatch >= 0 ? ", micro-batch " + microbatch : "") + ", PP rank " + pp + ": " + secondsText(length * 1e-6);
    find("operation-facts").textContent = text;
    tell(event, text);
  });

  for (const id of ["heatmap", "timeline", "steps"]) find(id).addEventListener("mouseleave", (event) => tell(event, ""));

  function stepAt(event) {
    const [x] = pointed(event);
    const place = Math.floor((x - plot.left) / stepBars(find("steps").clientWidth));
    return place >= 0 && place < data.steps.length ? place : null;
  }

  find("steps").addEventListener("mousemove", (event) => {
    const at = stepAt(event);
    if (at === null) return tell(event, "");
    tell(event, "step " + data.steps[at] + ": " + secondsText(data.actual[at]) + ", ideal " + secondsText(data.ideal[at]));
  });

  find("steps").addEventListener("click", (event) => {
    const at = stepAt(event);
    if (at !== null) show(at);
  });

  function show(place) {
    shown = place;
    find("step").value = String(place);
    const facts = place === ALL ? "" : secondsText(data.actual[place]) + ", ideal " + secondsText(data.ideal[place]);
    find("step-facts").textContent = facts;
    if (place !== ALL && timelineSteps.includes(data.steps[place])) find("timeline-step").value = String(data.steps[place]);
    ranks();
    draw();
  }

  function option(select, value, text) {
    const one = document.createElement("option");
    one.value = String(value);
    one.textContent = text;
    select.append(one);
  }

  function ranks() {
    const select = find("rank");
    const one = data.timelines[find("timeline-step").value];
    const before = select.value;
    select.replaceChildren();
    if (!one) return;
    one.dp_ranks.forEach((rank, place) => option(select, place, "DP rank " + rank + (rank === one.last ? ", the last to finish" : "")));
    select.value = before !== "" && Number(before) < one.dp_ranks.length ? before : String(Math.max(0, one.dp_ranks.indexOf(one.last)));
  }

  function draw() {
    drawHeatmap();
    drawSteps();
    drawTimeline();
  }

  option(find("step"), ALL, "all steps");
  data.steps.forEach((step, place) => option(find("step"), place, "step " + step));
  timelineSteps.forEach((step) => option(find("timeline-step"), step, String(step)));
  find("timeline-step").value = String(data.typical);
  find("step").addEventListener("change", () => show(Number(find("step").value)));
  const turn = (by) => show(((shown + 1 + by + data.steps.length + 1) % (data.steps.length + 1)) - 1);
  find("previous").addEventListener("click", () => turn(-1));
  find("next").addEventListener("click", () => turn(1));
  find("timeline-step").addEventListener("change", () => { ranks(); drawTimeline(); });
  find("rank").addEventListener("change", drawTimeline);
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  show(ALL);
  document.documentElement.dataset.drawn = "yes";
})();
