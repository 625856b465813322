"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { states, regions, rows, templates, blocks, findings } = data;
  const SHOWN = 300;

  // A symbol and a texture for each state: the page must be readable without colour.
  const KNOWN = {
    identical: ["\u00b7", "ok"], present: ["\u2022", "ok"], equal: ["=", "ok"], allowed: ["a", "ok"], waived: ["w", "ok"],
    changed: ["\u2260", "differs"], dtype: ["D", "differs"], shape: ["S", "differs"],
    missing: ["\u00d7", "lost"], unreadable: ["!", "lost"], missing_tensor: ["\u00d7", "lost"],
    extra: ["+", "added"], extra_tensor: ["+", "added"],
    not_read: ["?", "unseen"], not_compared: ["?", "unseen"],
    zero_tensor: ["0", "differs"], not_finite: ["N", "differs"], constant_tensor: ["C", "differs"],
    fresh_init: ["F", "differs"], stale_mtp: ["~", "differs"], same_as_trunk: ["T", "differs"],
    narrowed: ["<", "differs"], mtp_unchanged: ["U", "differs"], mtp_orphan: ["P", "added"],
  };
  const used = new Set(Object.values(KNOWN).map((entry) => entry[0]));
  const looks = states.map((state) => {
    if (Object.hasOwn(KNOWN, state)) return KNOWN[state];
    const letters = [...(state + "*#%ABCEFGHIJKLMNOPQRTUVXYZ")].map((c) => c.toUpperCase());
    const symbol = letters.find((c) => /\S/.test(c) && !used.has(c)) || "*";
    used.add(symbol);
    return [symbol, "other"];
  });

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  function plural(number, noun) {
    return number.toLocaleString("en-US") + " " + noun + (number === 1 ? "" : "s");
  }
  function chip(state) {
    return make("span", { class: "chip " + looks[state][1], "aria-hidden": "true" }, looks[state][0]);
  }
  function regionName(region) {
    const [kind, index] = regions[region];
    if (kind === "mtp") return "MTP depth " + index;
    return kind === "trunk" ? "trunk layer " + index : kind;
  }
  function nameOf(block, second) {
    const pieces = templates[block.template];
    let name = pieces[0];
    if (pieces.length > 1) name += block.first + pieces[1];
    if (pieces.length > 2) name += second + pieces[2];
    return name;
  }

  // Cells of the picture: all blocks of one row in one part of the model.
  const cells = new Map();
  let total = 0;
  const parsed = blocks.map(([template, region, first, row, flat]) => {
    const runs = [];
    let size = 0;
    for (let i = 0; i < flat.length; i += 3) {
      runs.push({ start: flat[i], length: flat[i + 1], state: flat[i + 2], id: total + size });
      size += flat[i + 1];
    }
    const block = { template, region, first, runs, id: total, size };
    total += size;
    const key = row + " " + region;
    if (!cells.has(key)) cells.set(key, { row, region, blocks: [], node: null });
    cells.get(key).blocks.push(block);
    return block;
  });

  // --- the picture -----------------------------------------------------------------------
  const columns = regions.map((_, number) => number);
  const layered = columns.filter((c) => regions[c][0] === "trunk" || regions[c][0] === "mtp");
  const rest = columns.filter((c) => !layered.includes(c));
  const picture = document.getElementById("grid");
  const matrix = [];
  // Wide models scroll; the MTP depths, which people come for, stay in sight at the right edge.
  const depths = layered.filter((c) => regions[c][0] === "mtp");
  function pin(node, region) {
    const after = depths.length - 1 - depths.indexOf(region);
    if (depths.length > 8 || after === depths.length) return;
    node.style.position = "sticky";
    node.style.right = after * 53 + "px";
  }

  function drawTable(parts, className, corner) {
    const shown = rows.map((_, row) => row)
      .filter((row) => parts.some((region) => cells.has(row + " " + region)));
    if (!shown.length) return;
    const head = make("tr", { role: "row" }, make("th", { scope: "col" }, corner));
    parts.forEach((region) => {
      const [kind, index] = regions[region];
      if (kind === "mtp") {
        const cell = make("th", { scope: "col", class: "mtp" }, "MTP " + index);
        pin(cell, region);
        head.append(cell);
      } else {
        const label = kind !== "trunk" ? kind : index % 5 === 0 ? String(index) : "";
        const cell = make("th", { scope: "col" }, make("span", {}, label));
        cell.title = regionName(region);
        cell.setAttribute("aria-label", regionName(region));
        head.append(cell);
      }
    });
    const body = make("tbody");
    shown.forEach((row) => {
      const line = make("tr", { role: "row" });
      const label = make("th", { scope: "row" }, rows[row]);
      label.title = rows[row];
      line.append(label);
      const nodes = [];
      parts.forEach((region) => {
        const cell = cells.get(row + " " + region);
        const mtp = regions[region][0] === "mtp" ? " mtp" : "";
        const node = make("td", { role: "gridcell" });
        if (mtp) pin(node, region);
        if (cell) {
          cell.node = node;
          cell.base = mtp;
          node.tabIndex = -1;
          node.cell = cell;
          cell.at = [matrix.length, nodes.length];
        } else {
          node.className = "none" + mtp;
        }
        nodes.push(node);
        line.append(node);
      });
      matrix.push(nodes);
      body.append(line);
    });
    const table = make("table", { role: "grid", class: "grid " + className, "aria-label": corner });
    table.append(make("thead", {}, head), body);
    picture.append(make("div", { class: "scroll" }, table));
  }
  drawTable(layered, "layers", "layer");
  drawTable(rest, "rest", "outside the layers");

  // --- filters ---------------------------------------------------------------------------
  const wanted = states.map(() => true);
  const search = document.getElementById("search");
  const count = document.getElementById("count");
  const buttons = document.getElementById("states");
  states.forEach((state, number) => {
    const button = make("button", { type: "button", "aria-pressed": "true", "data-state": state });
    button.append(chip(number), state + " " + data.counts[number].toLocaleString("en-US"));
    button.addEventListener("click", () => {
      wanted[number] = !wanted[number];
      button.setAttribute("aria-pressed", String(wanted[number]));
      refresh();
    });
    buttons.append(button);
  });

  function matcher() {
    const text = search.value.trim().toLowerCase();
    if (!text) return null;
    const parts = text.split("*").filter(Boolean);
    return (name) => {
      let from = 0;
      const lower = name.toLowerCase();
      for (const part of parts) {
        const found = lower.indexOf(part, from);
        if (found < 0) return false;
        from = found + part.length;
      }
      return true;
    };
  }
  // Calls use(second, state, id) for each tensor of a block that passes the filters.
  function eachMatch(block, test, use) {
    for (const run of block.runs) {
      if (!wanted[run.state]) continue;
      for (let i = 0; i < run.length; i++) {
        if (!test || test(nameOf(block, run.start + i))) use(run.start + i, run.state, run.id + i);
      }
    }
  }
  function refresh() {
    const test = matcher();
    let matching = 0;
    for (const cell of cells.values()) {
      const counts = new Map();
      for (const block of cell.blocks) {
        if (test) {
          eachMatch(block, test, (_, state) => counts.set(state, (counts.get(state) || 0) + 1));
        } else {
          for (const run of block.runs) {
            if (wanted[run.state]) counts.set(run.state, (counts.get(run.state) || 0) + run.length);
          }
        }
      }
      for (const number of counts.values()) matching += number;
      draw(cell, counts);
    }
    count.textContent = plural(matching, "tensor") + " of " + total.toLocaleString("en-US") + " shown";
    if (current) show(current);
  }
  function draw(cell, counts) {
    const node = cell.node;
    if (!counts.size) {
      node.className = "off" + cell.base;
      node.textContent = "";
    } else {
      const worst = Math.max(...counts.keys());
      const [symbol, look] = looks[worst];
      node.className = look + (counts.size > 1 ? " mixed" : "") + cell.base;
      node.textContent = symbol;
    }
    const said = [...counts].sort((a, b) => b[0] - a[0])
      .map(([state, number]) => number.toLocaleString("en-US") + " " + states[state]).join(", ");
    const label = rows[cell.row] + ", " + regionName(cell.region) + ": " + (said || "hidden by the filters");
    node.setAttribute("aria-label", label);
    node.title = label;
  }

  // --- details ---------------------------------------------------------------------------
  const details = document.getElementById("details");
  let current = null;
  function findingsOf(ids) {
    return findings.filter((finding) => {
      for (let i = 0; i < finding.ids.length; i += 2) {
        const end = finding.ids[i] + finding.ids[i + 1];
        if (ids.some(([from, to]) => from < end && finding.ids[i] < to)) return true;
      }
      return false;
    });
  }
  function show(cell) {
    const test = matcher();
    const lines = [];
    const ids = [];
    let matching = 0;
    for (const block of cell.blocks) {
      let open = null;
      eachMatch(block, test, (second, state, id) => {
        matching++;
        if (open && open.state === state && open.to + 1 === second) {
          open.to = second;
          open.ids[1] = id + 1;
        } else {
          open = { block, state, from: second, to: second, ids: [id, id + 1] };
          lines.push(open);
          ids.push(open.ids);
        }
      });
    }
    // Worst first; the sort is stable, so numbers stay in order.
    lines.sort((a, b) => b.state - a.state);
    const list = make("ul", { tabindex: "0", "aria-label": "tensors" });
    lines.slice(0, SHOWN).forEach((line) => {
      const second = line.from === line.to ? line.from : "{" + line.from + ".." + line.to + "}";
      list.append(make("li", {}, chip(line.state), make("code", {}, nameOf(line.block, second)), " ",
        make("span", { class: "quiet" }, states[line.state])));
    });
    if (lines.length > SHOWN) list.append(make("li", {}, plural(lines.length - SHOWN, "more line")));
    const said = make("ul", { "aria-label": "findings" });
    const concerned = findingsOf(ids);
    concerned.slice(0, SHOWN).forEach((finding) => {
      const item = make("li", {}, make("span", { class: "label" }, finding.label + " " + finding.rule),
        ": " + finding.message);
      if ("before" in finding || "after" in finding) {
        item.append(make("br"), "before ", make("code", {}, finding.before ?? "absent"), ", after ",
          make("code", {}, finding.after ?? "absent"));
      }
      if (finding.hint) item.append(make("br"), "hint: " + finding.hint);
      if (finding.do) item.append(make("br"), make("span", { class: "do" }, "do: " + finding.do));
      if (finding.waived) item.append(make("br"), "waived: " + finding.waived);
      said.append(item);
    });
    if (concerned.length > SHOWN) said.append(make("li", {}, plural(concerned.length - SHOWN, "more finding")));
    details.replaceChildren(
      make("h3", {}, make("code", {}, rows[cell.row]), " in " + regionName(cell.region)),
      make("p", {}, matching ? plural(matching, "tensor") : "No tensor here passes the filters."),
      list, concerned.length ? said : "");
  }
  function select(node) {
    const before = picture.querySelector('[aria-selected="true"]');
    if (before) before.removeAttribute("aria-selected");
    node.setAttribute("aria-selected", "true");
    details.className = "chosen";
    current = node.cell;
    show(current);
  }

  // --- mouse and keyboard ----------------------------------------------------------------
  let roving = null;
  function focusOn(node, grab) {
    if (roving) roving.tabIndex = -1;
    roving = node;
    node.tabIndex = 0;
    if (grab) node.focus();
  }
  function move(node, down, right) {
    let [y, x] = node.cell.at;
    for (;;) {
      y += down;
      x += right;
      if (y < 0 || y >= matrix.length) return;
      if (down) x = Math.min(x, matrix[y].length - 1);
      const next = matrix[y][x];
      if (!next) return;
      if (next.cell) return focusOn(next, true);
    }
  }
  const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  picture.addEventListener("click", (event) => {
    const node = event.target.closest("td");
    if (node && node.cell) {
      focusOn(node, true);
      select(node);
    }
  });
  picture.addEventListener("keydown", (event) => {
    const node = event.target.closest("td");
    if (!node || !node.cell) return;
    const line = matrix[node.cell.at[0]].filter((one) => one.cell);
    if (Object.hasOwn(MOVES, event.key)) move(node, ...MOVES[event.key]);
    else if (event.key === "Home") focusOn(line[0], true);
    else if (event.key === "End") focusOn(line[line.length - 1], true);
    else if (event.key === "Enter" || event.key === " ") select(node);
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target !== search) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape" && roving && event.target === search) {
      roving.focus();
    }
  });
  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, 120);
  });
  const first = matrix.flat().find((node) => node.cell);
  if (first) focusOn(first, false);
  refresh();
  document.body.dataset.ready = "yes";
})();
