"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const ROW = 18;

  const bytes = (text) => {
    const raw = atob(text);
    const out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out;
  };
  const number = (v) => {
    if (v === null || v === undefined) return "–";
    if (!Number.isFinite(v)) return Number.isNaN(v) ? "NaN" : "∞";
    if (v === 0 || Number.isInteger(v)) return String(v);
    const size = Math.abs(v);
    return size >= 1e-3 && size < 1e5 ? String(Number(v.toPrecision(4))) : v.toExponential(2);
  };
  const element = (tag, text, attributes = {}) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const shown = (name) => (name === "" ? "(model)" : name);

  /* ---- data ---------------------------------------------------------------------------------------- */

  const modules = data.modules.map((m) => ({ ...m, codes: bytes(m.errors) }));
  const byName = new Map(modules.map((m) => [m.name, m]));
  const errorOf = (code) => {
    if (code < 2) return 0;
    if (code === 255) return Infinity;
    return 10 ** (data.logLow + ((code - 2) / 252) * (data.logHigh - data.logLow));
  };
  /* Severity: −2 not compared, −1 equal, 0 to 1 within rounding, above 1 beyond it by so many decades. */
  for (const m of modules) {
    m.severity = new Float32Array(256);
    m.severity[0] = -2;
    m.severity[1] = -1;
    for (let code = 2; code < 256; code++) {
      const ratio = code === 255 ? Infinity : m.tolerance ? errorOf(code) / m.tolerance : 1e4;
      const decades = Math.log10(ratio);
      m.severity[code] = decades > 0 ? Math.min(1.01 + decades, 6) : Math.max(0, 1 + decades / 4);
    }
  }
  const delta = new Map();
  const logprobs = [];
  if (data.logprobs) {
    const n = data.logprobs.count;
    const values = new Float32Array(bytes(data.logprobs.values).buffer);
    const places = new Int32Array(bytes(data.logprobs.places).buffer);
    for (let i = 0; i < n; i++) {
      const item = { sequence: places[i], position: places[n + i], rollout: values[i], train: values[n + i] };
      item.difference = item.train - item.rollout;
      logprobs.push(item);
      delta.set(`${item.sequence}:${item.position}`, item);
    }
  }
  const tokenAt = (sequence, position) => {
    const found = data.sequences.find((s) => s.index === sequence);
    return found ? { id: found.tokens[position], text: found.texts[position] || "" } : { id: "", text: "" };
  };
  const tokenName = (t) => (t.text ? `${JSON.stringify(t.text)} (${t.id})` : String(t.id));

  /* ---- colours ------------------------------------------------------------------------------------- */

  let palette = {};
  const readPalette = () => {
    const style = getComputedStyle(document.documentElement);
    const names = ["ink", "soft", "faint", "rule", "grid", "card", "rounding", "diverged", "mark", "heat0", "heat1", "heat2", "hot1", "hot2", "hot3", "hole", "cursor"];
    palette = Object.fromEntries(names.map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
  };
  const rgb = (hex) => {
    const full = hex.length === 4 ? hex.replace(/[0-9a-f]/gi, "$&$&") : hex;
    return [1, 3, 5].map((i) => parseInt(full.slice(i, i + 2), 16));
  };
  const mix = (a, b, t) => {
    const [x, y] = [rgb(a), rgb(b)];
    return `rgb(${x.map((v, i) => Math.round(v + (y[i] - v) * t)).join(",")})`;
  };
  const colour = (severity) => {
    if (severity <= -2) return palette.hole;
    if (severity < 0) return palette.heat0;
    if (severity <= 1) return mix(palette.heat1, palette.heat2, severity);
    const hot = Math.min(severity - 1, 4) / 2;
    return hot <= 1 ? mix(palette.hot1, palette.hot2, hot) : mix(palette.hot2, palette.hot3, hot - 1);
  };

  /* ---- tree ---------------------------------------------------------------------------------------- */

  const root = { label: "", path: null, children: [], module: null, depth: -1, open: true };
  const insert = (m) => {
    const parts = m.name === "" ? ["(model)"] : m.name.split(".");
    let node = root;
    let path = "";
    for (let i = 0; i < parts.length; i++) {
      let label = parts[i];
      if (i + 1 < parts.length && /^\d+$/.test(parts[i + 1])) label += `.${parts[++i]}`;
      path = path ? `${path}.${label}` : label;
      let child = node.children.find((c) => c.label === label);
      if (!child) {
        child = { label, path, children: [], module: null, depth: node.depth + 1, open: false, parent: node };
        node.children.push(child);
      }
      node = child;
    }
    node.module = m;
    m.node = node;
  };
  modules.forEach(insert);
  const openTo = (node) => { for (let n = node.parent; n && n !== root; n = n.parent) n.open = true; };
  const walk = (node, visit) => { for (const child of node.children) { visit(child); walk(child, visit); } };
  const below = (node) => {
    const found = node.module ? [node.module] : [];
    walk(node, (n) => n.module && found.push(n.module));
    return found;
  };
  root.children.forEach((n) => { n.open = true; });
  const firstModule = data.first && data.first.module !== null ? byName.get(data.first.module) : null;
  if (firstModule) openTo(firstModule.node);
  let rows = [];
  const listRows = () => {
    rows = [];
    const add = (node) => { for (const child of node.children) { rows.push(child); if (child.open) add(child); } };
    add(root);
  };
  const statusOf = (node) => {
    const all = node.open && node.module ? [node.module] : below(node);
    return all.some((m) => m.status === "diverged") ? "diverged" : all.some((m) => m.status === "rounding") ? "rounding" : "equal";
  };

  const drawTree = () => {
    const tree = $("tree");
    tree.replaceChildren();
    rows.forEach((node, place) => {
      const line = element("div", undefined, { role: "treeitem", "aria-level": node.depth + 1 });
      line.className = `${statusOf(node)}${place === cursor.row ? " here" : ""}`;
      line.style.paddingLeft = `${node.depth * 12}px`;
      const turn = element("button", node.children.length ? (node.open ? "▾" : "▸") : "", { type: "button", tabindex: node.children.length ? 0 : -1 });
      turn.className = "turn";
      if (node.children.length) {
        line.setAttribute("aria-expanded", String(node.open));
        turn.setAttribute("aria-label", `${node.open ? "Fold" : "Unfold"} ${node.path}`);
        turn.addEventListener("click", () => toggle(node));
      } else turn.setAttribute("aria-hidden", "true");
      const name = element("button", node.label, { type: "button", title: node.path, "data-module": node.module ? node.module.name : "" });
      name.className = "name";
      name.addEventListener("click", () => (node.module ? openDetail(node.module) : toggle(node)));
      line.append(turn, name);
      tree.append(line);
    });
  };
  const toggle = (node) => { if (node.children.length) { node.open = !node.open; refresh(); } };

  /* ---- heat map ------------------------------------------------------------------------------------ */

  const cursor = { row: -1, position: -1 };
  let current = 0;
  let columns = 0;
  let mapWidth = 0;
  const sequence = () => data.sequences[current];
  const surface = (canvas, width, height) => {
    const scale = height * devicePixelRatio > 16000 ? 1 : devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    return pen;
  };
  const span = (column) => {
    const length = sequence().tokens.length;
    return [Math.floor((column * length) / columns), Math.max(Math.floor(((column + 1) * length) / columns), Math.floor((column * length) / columns) + 1)];
  };
  const columnOf = (position) => Math.min(columns - 1, Math.floor(((position + 0.5) * columns) / sequence().tokens.length));
  const worstIn = (members, from, to) => {
    let worst = -2;
    for (const m of members) for (let i = from; i < to; i++) {
      const severity = m.severity[m.codes[i]];
      if (severity > worst) worst = severity;
    }
    return worst;
  };
  const drawHeat = () => {
    const seq = sequence();
    const room = $("map").clientWidth - 28 - 236 - 14;
    mapWidth = Math.max(120, Math.min(room, seq.tokens.length * 22));
    columns = Math.min(seq.tokens.length, Math.floor(mapWidth / 2));
    const pen = surface($("heat"), mapWidth, rows.length * ROW);
    const x = (c) => Math.round((c * mapWidth) / columns);
    const gap = mapWidth / columns > 6 ? 1 : 0;
    rows.forEach((node, r) => {
      const members = node.open && node.children.length ? (node.module ? [node.module] : []) : below(node);
      for (let c = 0; c < columns; c++) {
        const [a, b] = span(c);
        pen.fillStyle = colour(worstIn(members, seq.start + a, seq.start + b));
        pen.fillRect(x(c), r * ROW + 1, x(c + 1) - x(c) - gap, ROW - 2);
      }
    });
    const edge = x(columnOf(Math.min(seq.prompt, seq.tokens.length - 1)));
    pen.strokeStyle = palette.faint;
    pen.setLineDash([3, 3]);
    pen.beginPath(); pen.moveTo(edge - 0.5, 0); pen.lineTo(edge - 0.5, rows.length * ROW); pen.stroke();
    pen.setLineDash([]);
    if (cursor.row >= 0 && cursor.row < rows.length && cursor.position >= 0) {
      const c = columnOf(cursor.position);
      pen.strokeStyle = palette.cursor;
      pen.lineWidth = 1.5;
      pen.strokeRect(x(c) - 0.5, cursor.row * ROW + 0.5, Math.max(4, x(c + 1) - x(c)), ROW - 1);
    }
    drawAxis(x);
  };
  const drawAxis = (x) => {
    const pen = surface($("axis"), mapWidth, 18);
    const length = sequence().tokens.length;
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((s) => (s * mapWidth) / length > 34) || 10000;
    pen.fillStyle = palette.faint;
    for (let p = 0; p < length; p += step) pen.fillText(String(p), x(columnOf(p)), 12);
  };
  const readout = () => {
    const node = rows[cursor.row];
    if (!node || cursor.position < 0) return;
    const seq = sequence();
    const members = node.open && node.module ? [node.module] : below(node);
    let worst = null;
    for (const m of members) {
      const code = m.codes[seq.start + cursor.position];
      if (!worst || m.severity[code] > worst.m.severity[worst.code]) worst = { m, code };
    }
    const where = `sequence ${seq.index}, position ${cursor.position} (${cursor.position < seq.prompt ? "prompt" : "response"}), token ${tokenName(tokenAt(seq.index, cursor.position))}`;
    let what = "not compared";
    if (worst && worst.code === 1) what = "bitwise equal";
    if (worst && worst.code > 1) what = `error ${number(errorOf(worst.code))}, rounding allows ${number(worst.m.tolerance)}`;
    const change = delta.get(`${seq.index}:${cursor.position}`);
    $("readout").textContent = `${worst ? shown(worst.m.name) : node.path} · ${where} · ${what}${change ? ` · Δ log p ${number(change.difference)}` : ""}`;
  };
  const place = (event) => {
    const box = $("heat").getBoundingClientRect();
    const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) * columns) / box.width)));
    const row = Math.min(rows.length - 1, Math.max(0, Math.floor((event.clientY - box.top) / ROW)));
    const node = rows[row];
    const members = node.open && node.module ? [node.module] : below(node);
    const [a, b] = span(column);
    let best = a;
    for (let p = a; p < b; p++) if (worstIn(members, sequence().start + p, sequence().start + p + 1) > worstIn(members, sequence().start + best, sequence().start + best + 1)) best = p;
    return { row, position: best };
  };
  const moveTo = (row, position) => {
    cursor.row = Math.min(rows.length - 1, Math.max(0, row));
    cursor.position = Math.min(sequence().tokens.length - 1, Math.max(0, position));
    drawHeat();
    drawTree();
    markToken();
    readout();
  };
  const keepVisible = () => {
    const body = document.querySelector(".map .body");
    const top = cursor.row * ROW;
    if (top < body.scrollTop) body.scrollTop = top;
    if (top + ROW > body.scrollTop + body.clientHeight) body.scrollTop = top + ROW - body.clientHeight;
  };
  const openRow = () => {
    const node = rows[cursor.row];
    if (node && node.module) openDetail(node.module); else if (node) toggle(node);
  };
  const onKey = (event) => {
    const jump = event.shiftKey ? 10 : 1;
    const node = rows[cursor.row];
    const moves = {
      ArrowUp: () => moveTo(cursor.row - 1, cursor.position), ArrowDown: () => moveTo(cursor.row + 1, cursor.position),
      ArrowLeft: () => moveTo(cursor.row, cursor.position - jump), ArrowRight: () => moveTo(cursor.row, cursor.position + jump),
      Home: () => moveTo(cursor.row, 0), End: () => moveTo(cursor.row, sequence().tokens.length - 1),
      Enter: openRow, " ": openRow,
      "+": () => node && !node.open && toggle(node), "-": () => node && node.open && toggle(node),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    if (cursor.row < 0) moveTo(firstModule ? Math.max(0, rows.indexOf(firstModule.node)) : 0, Math.max(0, cursor.position));
    else moves[event.key]();
    keepVisible();
  };
  const refresh = () => {
    listRows();
    if (cursor.row >= rows.length) cursor.row = rows.length - 1;
    drawTree();
    drawHeat();
  };
  const drawLegend = () => {
    const legend = $("legend");
    legend.replaceChildren();
    const add = (severity, text) => {
      const swatch = element("i");
      swatch.style.background = colour(severity);
      legend.append(swatch, element("span", text));
    };
    add(-1, "equal"); add(0.6, "rounding"); add(1.1, "beyond"); add(3, "×100"); add(5, "×10⁴");
  };

  /* ---- tokens -------------------------------------------------------------------------------------- */

  const biggest = logprobs.reduce((most, item) => (Number.isFinite(item.difference) ? Math.max(most, Math.abs(item.difference)) : most), 0);
  const drawTokens = () => {
    const seq = sequence();
    const box = $("tokens");
    box.replaceChildren();
    const limit = 4096;
    seq.tokens.slice(0, limit).forEach((id, position) => {
      const text = seq.texts[position] || String(id);
      const button = element("button", text, { type: "button", title: `position ${position}, id ${id}` });
      const change = delta.get(`${seq.index}:${position}`);
      if (position < seq.prompt) button.className = "prompt";
      if (change) {
        const strength = biggest > 0 ? Math.min(1, Math.abs(change.difference) / biggest) : 0;
        button.style.background = mix(palette.heat0, change.difference >= 0 ? palette.heat2 : palette.hot2, Math.sqrt(strength));
        button.title += `, rollout ${number(change.rollout)}, train ${number(change.train)}, Δ ${number(change.difference)}`;
      }
      button.addEventListener("click", () => { if (rows.length) moveTo(Math.max(0, cursor.row), position); });
      box.append(button);
    });
    if (seq.tokens.length > limit) box.append(element("span", ` … ${seq.tokens.length - limit} more`));
  };
  const markToken = () => {
    const box = $("tokens");
    box.querySelectorAll(".here").forEach((b) => b.classList.remove("here"));
    const button = box.children[cursor.position];
    if (button) button.classList.add("here");
  };
  const chart = (canvas, height) => {
    const width = Math.max(120, canvas.parentElement.clientWidth - (canvas.closest(".card") ? 36 : 0));
    return { pen: surface(canvas, width, height), width, height };
  };
  const drawDelta = () => {
    const seq = sequence();
    const { pen, width, height } = chart($("delta"), 170);
    const mine = logprobs.filter((item) => item.sequence === seq.index);
    const top = Math.max(...mine.map((item) => Math.abs(item.difference)).filter(Number.isFinite), 1e-12);
    const left = 58;
    const count = Math.max(1, seq.tokens.length - seq.prompt);
    const x = (p) => left + ((p - seq.prompt + 0.5) / count) * (width - left - 6);
    const y = (v) => height / 2 - 4 - (v / top) * (height / 2 - 16);
    pen.strokeStyle = palette.grid;
    pen.fillStyle = palette.faint;
    for (const v of [top, top / 2, 0, -top / 2, -top]) {
      pen.beginPath(); pen.moveTo(left, y(v)); pen.lineTo(width, y(v)); pen.stroke();
      pen.fillText(number(Number(v.toPrecision(2))), 0, y(v) + 4);
    }
    const thick = Math.max(1, Math.min(14, ((width - left) / count) * 0.7));
    for (const item of mine) {
      if (!Number.isFinite(item.difference)) { pen.fillStyle = palette.mark; pen.fillRect(x(item.position) - 1, 4, 2, height - 16); continue; }
      pen.fillStyle = item.difference >= 0 ? palette.rounding : palette.mark;
      pen.fillRect(x(item.position) - thick / 2, Math.min(y(0), y(item.difference)), thick, Math.max(1, Math.abs(y(item.difference) - y(0))));
    }
    pen.fillStyle = palette.faint;
    pen.fillText(`position ${seq.prompt}`, left, height - 2);
    pen.textAlign = "right";
    pen.fillText(String(seq.tokens.length - 1), width - 2, height - 2);
  };
  const histogram = (canvas, sizes, height) => {
    const { pen, width } = chart(canvas, height);
    const finite = sizes.filter((v) => Number.isFinite(v) && v > 0).map(Math.log10);
    const zero = sizes.filter((v) => v === 0).length;
    const odd = sizes.length - finite.length - zero;
    let low = 0, high = 0;
    if (finite.length) { low = Math.floor(Math.min(...finite.slice(0, 1e5))); high = Math.ceil(Math.max(...finite.slice(0, 1e5))); }
    if (high <= low) high = low + 1;
    const bins = new Array((high - low) * 4).fill(0);
    for (const v of finite) bins[Math.min(bins.length - 1, Math.max(0, Math.floor((v - low) * 4)))]++;
    const all = [zero, ...bins];
    const top = Math.max(...all, 1);
    const base = height - 20;
    const step = width / (all.length + 1);
    all.forEach((count, i) => {
      const x = i === 0 ? 0 : (i + 1) * step;
      const tall = count ? Math.max(2, (count / top) * (base - 14)) : 0;
      pen.fillStyle = i === 0 ? palette.faint : palette.rounding;
      pen.fillRect(x + 1, base - tall, Math.max(1, step - 2), tall);
    });
    pen.fillStyle = palette.faint;
    pen.fillText("0", 2, height - 6);
    const every = Math.max(1, Math.ceil((high - low) / (width / 70)));
    for (let d = low; d < high; d += every) pen.fillText(`1e${d}`, (2 + (d - low) * 4) * step, height - 6);
    pen.textAlign = "right";
    pen.fillText(`tallest: ${top}${odd ? `, not finite: ${odd}` : ""}`, width - 2, 10);
  };

  /* ---- tables -------------------------------------------------------------------------------------- */

  const table = (node, columnsOf, items, open) => {
    let sorted = { key: null, down: true };
    const head = element("thead");
    const headRow = element("tr");
    const body = element("tbody");
    const fill = () => {
      const list = [...items];
      if (sorted.key) {
        const of = columnsOf.find((c) => c.title === sorted.key).value;
        const rank = (v) => (v === null || v === undefined ? -Infinity : Number.isNaN(v) ? Infinity : v);
        list.sort((a, b) => {
          const [x, y] = [of(a), of(b)];
          const order = typeof x === "string" && typeof y === "string" ? x.localeCompare(y, "en", { numeric: true }) : rank(x) - rank(y);
          return sorted.down ? -order : order;
        });
      }
      body.replaceChildren(...list.slice(0, 2000).map((item) => {
        const line = element("tr", undefined, open ? { tabindex: 0 } : {});
        for (const column of columnsOf) {
          const cell = element("td");
          if (column.dot) { cell.className = `name ${item.status || ""}`; cell.append(element("i", undefined, { class: "dot" })); }
          cell.append(column.show ? column.show(item) : typeof column.value(item) === "string" ? column.value(item) : number(column.value(item)));
          line.append(cell);
        }
        if (open) {
          line.addEventListener("click", () => open(item));
          line.addEventListener("keydown", (event) => event.key === "Enter" && open(item));
        }
        return line;
      }));
    };
    for (const column of columnsOf) {
      const cell = element("th", undefined, { scope: "col" });
      const button = element("button", column.title, { type: "button" });
      button.addEventListener("click", () => {
        sorted = { key: column.title, down: sorted.key === column.title ? !sorted.down : typeof column.value(items[0] || {}) !== "string" };
        headRow.querySelectorAll("th").forEach((th) => th.removeAttribute("aria-sort"));
        cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
        fill();
      });
      cell.append(button);
      headRow.append(cell);
    }
    head.append(headRow);
    node.replaceChildren(head, body);
    fill();
  };
  const moduleColumns = [
    { title: "Module", value: (m) => shown(m.name), dot: true }, { title: "Status", value: (m) => m.status },
    { title: "Introduced", value: (m) => m.introduced }, { title: "Inherited", value: (m) => m.inherited },
    { title: "Allowed", value: (m) => m.tolerance }, { title: "Max |d|", value: (m) => m.maxAbs },
    { title: "Mean |d|", value: (m) => m.meanAbs }, { title: "Cosine", value: (m) => m.cosine },
    { title: "Max ulp", value: (m) => m.ulp }, { title: "Equal", value: (m) => m.equal, show: (m) => (m.equal === null ? "–" : `${(100 * m.equal).toFixed(1)} %`) },
    { title: "Rows", value: (m) => m.rows }, { title: "By", value: (m) => m.how },
  ];
  const tokenColumns = [
    { title: "Token", value: (t) => tokenName(tokenAt(t.sequence, t.position)) }, { title: "Sequence", value: (t) => t.sequence },
    { title: "Position", value: (t) => t.position }, { title: "Rollout log p", value: (t) => t.rollout },
    { title: "Train log p", value: (t) => t.train }, { title: "Δ log p", value: (t) => t.difference },
    { title: "|Δ|", value: (t) => Math.abs(t.difference) },
  ];

  /* ---- one module ---------------------------------------------------------------------------------- */

  const openDetail = (m) => {
    $("detail-title").textContent = shown(m.name);
    $("detail-status").textContent = `${m.status}, matched by ${m.how}`;
    $("detail-status").className = m.status;
    const numbers = [["Rows", m.rows], ["Introduced", m.introduced], ["Inherited", m.inherited], ["Rounding allows", m.tolerance], ["Max |d|", m.maxAbs],
      ["Mean |d|", m.meanAbs], ["Cosine", m.cosine], ["Max ulp", m.ulp], ["Equal elements", m.equal]];
    $("detail-numbers").replaceChildren(...numbers.map(([name, value]) => {
      const pair = element("div");
      pair.append(element("dt", name), element("dd", number(value)));
      return pair;
    }));
    const parts = [{ title: "Output", value: (p) => `${p.part}${p.use ? ` (use ${p.use})` : ""}` }, { title: "Status", value: (p) => p.status },
      { title: "Rollout", value: (p) => `${p.dtypes[0]} [${p.shapes[0].join(", ")}]` }, { title: "Train", value: (p) => `${p.dtypes[1]} [${p.shapes[1].join(", ")}]` }, { title: "By", value: (p) => p.how }];
    table($("detail-parts"), parts, m.parts);
    $("detail-notes").replaceChildren(...m.notes.map((note) => element("li", note)));
    if (!$("detail").open) $("detail").showModal();
    drawDetail(m);
  };
  const drawDetail = (m) => {
    const known = data.sequences.length > 0;
    for (const id of ["detail-line", "detail-histogram"]) $(id).parentElement.hidden = !known;
    if (!known) return;
    const seq = sequence();
    const { pen, width, height } = chart($("detail-line"), 130);
    const codes = m.codes.subarray(seq.start, seq.start + seq.tokens.length);
    const low = data.logLow, high = data.logHigh, left = 40;
    const y = (v) => 6 + ((high - v) / (high - low)) * (height - 26);
    pen.strokeStyle = palette.grid;
    pen.fillStyle = palette.faint;
    for (let d = low; d <= high; d += 3) { pen.beginPath(); pen.moveTo(left, y(d)); pen.lineTo(width, y(d)); pen.stroke(); pen.fillText(`1e${d}`, 0, y(d) + 4); }
    if (m.tolerance) {
      pen.strokeStyle = palette.mark; pen.setLineDash([4, 3]);
      pen.beginPath(); pen.moveTo(left, y(Math.log10(m.tolerance))); pen.lineTo(width, y(Math.log10(m.tolerance))); pen.stroke(); pen.setLineDash([]);
    }
    const step = (width - left) / codes.length;
    codes.forEach((code, p) => {
      if (code < 2) return;
      const v = code === 255 ? high : Math.log10(errorOf(code));
      pen.fillStyle = m.severity[code] > 1 ? palette.diverged : palette.rounding;
      pen.fillRect(left + p * step, y(v), Math.max(1.5, step - 1), height - 20 - y(v));
    });
    pen.fillStyle = palette.faint;
    pen.fillText(`sequence ${seq.index}, position 0`, left, height - 4);
    const sizes = [];
    for (const code of m.codes) if (code > 0) sizes.push(code === 255 ? Infinity : errorOf(code));
    histogram($("detail-histogram"), sizes, 120);
  };

  /* ---- start --------------------------------------------------------------------------------------- */

  const choose = (place) => {
    current = Math.min(data.sequences.length - 1, Math.max(0, place));
    $("sequence").value = String(current);
    cursor.position = Math.min(cursor.position, sequence().tokens.length - 1);
    draw();
  };
  const draw = () => {
    if (!data.sequences.length) return;
    if (modules.length) refresh();
    drawTokens();
    markToken();
    if (logprobs.length) drawDelta();
  };
  const drawAll = () => {
    readPalette();
    drawLegend();
    draw();
    if (logprobs.length) histogram($("spread"), logprobs.map((item) => Math.abs(item.difference)), 170);
  };
  data.sequences.forEach((s, place) => {
    const worst = logprobs.filter((item) => item.sequence === s.index).reduce((most, item) => Math.max(most, Math.abs(item.difference)), 0);
    $("sequence").append(element("option", `${s.index} · ${s.tokens.length} tokens${worst ? ` · max |Δ| ${number(worst)}` : ""}`, { value: place }));
  });
  if (data.leftOut) $("sequence").parentElement.append(` (${data.leftOut} more are in result.json)`);
  if (data.first && data.first.tokens.length) {
    const [sequenceIndex, position] = data.first.tokens[0];
    current = Math.max(0, data.sequences.findIndex((s) => s.index === sequenceIndex));
    cursor.position = position;
  }
  $("sequence").value = String(current);
  $("sequence").addEventListener("change", (event) => choose(Number(event.target.value)));
  $("previous").addEventListener("click", () => choose(current - 1));
  $("next").addEventListener("click", () => choose(current + 1));
  $("unfold").addEventListener("click", () => { walk(root, (n) => { n.open = true; }); refresh(); });
  $("fold").addEventListener("click", () => { walk(root, (n) => { n.open = n.depth === 0; }); if (firstModule) openTo(firstModule.node); refresh(); });
  $("heat").addEventListener("keydown", onKey);
  $("heat").addEventListener("pointermove", (event) => { const p = place(event); if (p.row !== cursor.row || p.position !== cursor.position) moveTo(p.row, p.position); });
  $("heat").addEventListener("click", (event) => { const p = place(event); moveTo(p.row, p.position); openRow(); });
  $("detail").addEventListener("click", (event) => event.target === $("detail") && $("detail").close());
  $("map-section").hidden = !modules.length || !data.sequences.length;
  $("token-section").hidden = !data.sequences.length;
  document.querySelector("#token-section .pair").hidden = !logprobs.length;
  $("module-section").hidden = !modules.length;
  $("worst-section").hidden = !logprobs.length;
  table($("modules"), moduleColumns, modules, openDetail);
  table($("worst"), tokenColumns, [...logprobs].sort((a, b) => Math.abs(b.difference) - Math.abs(a.difference)).slice(0, 200), (t) => {
    const at = data.sequences.findIndex((s) => s.index === t.sequence);
    if (at >= 0) { cursor.position = t.position; choose(at); $("tokens").scrollIntoView({ block: "center" }); }
  });
  drawAll();
  if (firstModule && cursor.row < 0 && rows.length && data.sequences.length) moveTo(Math.max(0, rows.indexOf(firstModule.node)), Math.max(0, cursor.position));
  addEventListener("resize", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
