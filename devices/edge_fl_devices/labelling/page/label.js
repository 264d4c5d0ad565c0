"use strict";
/* One picture at a time: a key or a tap labels, skips or discards it, and the answer brings the next one. The picture on the screen and its
   preselected class stay as they are while a new head is fitted, so that no key hits something else than was seen. */

const POLL_MS = 2000, BUSY_MS = 400;
const $ = (id) => document.getElementById(id);
const client = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
const done = [];
let view = null, shown = null, selected = "", waiting = false, timer = 0;

async function request(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { ...options, headers: { "X-Edge-FL": "label" }, cache: "no-store" });
  const content = await response.json();
  if (!response.ok) throw new Error(content.error);
  return content;
}

async function enter() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  const headers = { "X-Edge-FL": "label", Authorization: "Bearer " + token };
  const response = await fetch("/api/label/enter", { method: "POST", body: "", headers });
  if (!response.ok) throw new Error((await response.json()).error);
}

const address = (name) => "/api/label/picture?name=" + encodeURIComponent(name);
const percent = (share) => Math.round(100 * share) + " %";

function adopt(fresh) {
  view = fresh;
  const name = view.picture ? view.picture.name : "";
  if (name !== (shown ? shown.name : "")) {
    shown = view.picture;
    preselect();
    $("picture").hidden = !shown;
    if (shown) $("picture").src = address(shown.name);
    for (const next of view.upcoming) new Image().src = address(next);
  } else if (shown && !shown.guesses.length && view.picture.guesses.length) {
    shown = view.picture;
    if (!selected) preselect();
  }
  draw();
}

function preselect() {
  const best = shown && shown.guesses[0];
  selected = best && view.classes.some((each) => each.name === best.label) ? best.label : "";
}

function draw() {
  const labelled = view.classes.reduce((sum, each) => sum + each.pictures, 0);
  $("accuracy").textContent = view.accuracy === null ? "–" : percent(view.accuracy);
  $("accuracy").title = view.accuracy === null ? "" : "cross-validated on " + view.measured + " labelled pictures";
  $("labelled").textContent = labelled;
  $("unlabelled").textContent = view.unlabelled;
  $("empty").hidden = Boolean(shown);
  $("empty").textContent = view.unlabelled
    ? "The other pictures are on the screens of other people."
    : "No picture to label. New ones come from a camera, a watched folder, or POST /frame.";
  const guess = shown && shown.guesses.find((each) => each.label === selected);
  $("picture").alt = shown ? "Picture to label" : "";
  $("caption").textContent = !shown ? "" : [
    shown.guesses.map((each) => each.label + " " + percent(each.probability)).join(" · ") || "no prediction yet",
    shown.time ? new Date(1000 * shown.time).toLocaleString() : "",
  ].filter(Boolean).join("  –  ");
  $("accept").firstChild.textContent = selected ? (guess && guess === shown.guesses[0] ? "Accept " : "Label as ") + selected + (guess ? " (" + percent(guess.probability) + ")" : "") : view.classes.length ? "Select a class" : "Add a class first";
  const idle = Boolean(shown) && !waiting;
  $("accept").disabled = !idle || !selected;
  $("skip").disabled = $("discard").disabled = !idle;
  $("undo").disabled = waiting || !done.length;
  drawClasses();
  const outside = view.classes.filter((each) => !each.learned);
  $("rule").hidden = !outside.length;
  $("rule").textContent = outside.length
    ? "Dashed: no class of release " + view.release + ". Its pictures stay in the folder of this name and are learned once a release names the class."
    : "";
  $("status").textContent = status();
  $("status").classList.toggle("problem", Boolean(view.problem));
}

/* Buttons are changed in place: one that is replaced between press and release gets no click. */
function drawClasses() {
  const box = $("classes");
  while (box.children.length > view.classes.length) box.lastChild.remove();
  while (box.children.length < view.classes.length) {
    const element = document.createElement("button"), number = box.children.length;
    element.append(document.createElement("kbd"), document.createElement("span"), document.createElement("small"));
    element.children[0].textContent = number < 9 ? number + 1 : "0";
    element.children[0].hidden = number > 9;
    element.onclick = () => label(view.classes[number].name);
    box.append(element);
  }
  view.classes.forEach((each, number) => {
    const element = box.children[number];
    element.children[1].textContent = each.name;
    element.children[2].textContent = each.pictures;
    element.classList.toggle("waits", !each.learned);
    element.setAttribute("aria-pressed", String(each.name === selected));
    element.disabled = !shown || waiting;
  });
}

function status() {
  if (view.problem) return "Not learned yet: " + view.problem;
  if (view.waiting) return "Learning from " + view.waiting + " more labelled pictures ...";
  if (!view.release) return "No release yet: labels are stored, and learned when the first one arrives.";
  if (!view.head) return "Two labelled pictures, and predictions begin.";
  return "Release " + view.release + ", " + view.head + " head" + (view.busy ? ", learning ..." : "");
}

function say(text, problem = false) {
  $("message").textContent = text;
  $("message").classList.toggle("problem", problem);
}

async function act(work) {
  if (waiting) return;
  waiting = true;
  draw();
  try {
    await work();
  } catch (error) {
    await refresh();
    say(error.message, true);
  }
  waiting = false;
  draw();
  plan();
}

async function perform(path, body, text) {
  const answer = await request(path, { client, name: shown.name, ...body });
  done.push([answer.action, text]);
  say(text);
  adopt(answer.view);
}

const label = (name) => act(() => perform("/api/label/label", { class_name: name }, "Labelled: " + name));
const skip = () => act(() => perform("/api/label/skip", {}, "Skipped"));
const discard = () => act(() => perform("/api/label/discard", {}, "Discarded"));

const undo = () => act(async () => {
  const [action, text] = done.pop();
  const fresh = await request("/api/label/undo", { client, action });
  say("Undone: " + text);
  adopt(fresh);
});

const addClass = (name) => act(async () => {
  const fresh = await request("/api/label/class", { client, name });
  say("New class: " + name);
  close();
  adopt(fresh);
});

function open() {
  $("new").hidden = false;
  $("name").value = "";
  $("name").focus();
}

function close() {
  $("new").hidden = true;
  $("name").blur();
}

async function refresh() {
  adopt(await request("/api/label/view?client=" + client));
}

function plan() {
  clearTimeout(timer);
  timer = setTimeout(poll, view && view.busy ? BUSY_MS : POLL_MS);
}

async function poll() {
  if (!waiting && !document.hidden) {
    try {
      await refresh();
    } catch (error) {
      say(error.message || "the device does not answer", true);
    }
  }
  plan();
}

$("accept").onclick = () => label(selected);
$("skip").onclick = skip;
$("discard").onclick = discard;
$("undo").onclick = undo;
$("add").onclick = open;
$("cancel").onclick = close;
$("picture").onerror = () => { if (shown) poll(); };
$("new").onsubmit = (event) => {
  event.preventDefault();
  if ($("name").value.trim()) addClass($("name").value.trim());
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return close();
  if (!$("new").hidden || event.ctrlKey || event.metaKey || event.altKey || !view) return;
  const keys = { s: skip, d: discard, u: undo, n: open };
  if (event.key === "Enter" && event.target.tagName !== "BUTTON") {
    if (!$("accept").disabled) label(selected);
  } else if (/^[0-9]$/.test(event.key)) {
    const found = view.classes[(Number(event.key) + 9) % 10];
    if (found && shown) label(found.name);
  } else if (event.key.startsWith("Arrow") && view.classes.length) {
    const step = event.key === "ArrowDown" || event.key === "ArrowRight" ? 1 : -1, count = view.classes.length;
    const at = view.classes.findIndex((each) => each.name === selected);
    selected = view.classes[at < 0 ? 0 : (at + step + count) % count].name;
    draw();
  } else if (keys[event.key.toLowerCase()]) {
    const isOff = { u: "undo", s: "skip", d: "discard" }[event.key.toLowerCase()];
    if (!isOff || !$(isOff).disabled) keys[event.key.toLowerCase()]();
  } else return;
  event.preventDefault();
});

enter().then(refresh).then(plan).catch((error) => say(error.message, true));
