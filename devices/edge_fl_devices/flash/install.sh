#!/bin/sh
# Install the edge-fl agent from the folder of this script, as root.
# May be interrupted at any line and run again: completed steps are kept, the others are repeated.
# With --first-boot only enable edge-fl-install.service, which runs this script when the system is up, until it succeeds.
set -eu

here=$(CDPATH='' cd "$(dirname "$0")" && pwd)
log="$here/install.log"
opt=/opt/edge-fl
etc=/etc/edge-fl
var=/var/lib/edge-fl
units=/etc/systemd/system
images=@IMAGES@
label=@LABEL@ # "yes": start the label page at every boot

[ "$(id -u)" = 0 ] || { echo "edge-fl: not root; run it with sudo"; exit 1; }

# All output goes to the log on the card's FAT partition, where any computer can read why a Pi does not start.
if [ "${1:-}" != logged ]; then
  exec 9>/run/edge-fl-install.lock && flock 9 # one installation at a time
  # A partition damaged by a power cut may be read-only until its next check.
  [ ! -f "$log" ] || { tail -c 100000 "$log" >"$log.new" && mv "$log.new" "$log"; } || log=/run/edge-fl-install.log
  status=0
  sh "$0" logged "$@" >>"$log" 2>&1 || status=$?
  echo "edge-fl: install rc=$status" | tee -a "$log"
  [ "$status" = 0 ] || tail -n 5 "$log" >&2
  sync
  exit "$status"
fi

# Code 78: edge-fl-install.service does not try again, because another try would fail, too.
fail() { echo "edge-fl: $*; nothing was changed"; exit 78; }

enable() {
  install -m 0644 "$here/$1" "$units/$1"
  mkdir -p "$units/multi-user.target.wants"
  ln -sfn "../$1" "$units/multi-user.target.wants/$1"
}

if [ "${2:-}" = --first-boot ]; then
  enable edge-fl-install.service
  echo "edge-fl: the installation starts when the system is up"
  exit 0
fi

echo "edge-fl: installing, $(uname -m), $(date -u +%FT%TZ)"
[ "$(dpkg --print-architecture)" = arm64 ] ||
  fail "this system is $(dpkg --print-architecture); expected 64-bit Raspberry Pi OS (arm64): onnxruntime has no 32-bit wheel"
python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
wanted="$here/requirements-$python.txt"
[ -f "$wanted" ] || fail "Python $python; this bundle has $(cd "$here" && echo requirements-*.txt)"
python3 -c 'import ensurepip, venv' || fail "Python has no venv module; install it: apt install python3-venv"
if ! (cd "$here" && sha256sum --check --quiet --ignore-missing bundle.sha256); then
  rm -f "$here/bundle.sha256" # so that the next flash writes every file again
  fail "the bundle is damaged; flash it again"
fi

# The environment is named after the hash of its requirements; `current` is switched to it atomically once it is complete.
venv="$opt/venv-$(sha256sum "$wanted" | cut -c 1-12)"
if [ ! -f "$venv/complete" ]; then
  mkdir -p "$opt"
  free=$(df -Pm "$opt" | tail -n 1 | tr -s ' ' | cut -d ' ' -f 4)
  [ "$free" -ge 600 ] || { echo "edge-fl: $free MB are free in $opt; expected 600"; exit 1; }
  rm -rf "$venv"
  python3 -m venv --without-pip "$venv"
  pip=$(echo "$here"/wheels/pip-*.whl)/pip # pip runs from its wheel; its cache keeps what was downloaded for the next try
  (cd "$here" && "$venv/bin/python" "$pip" install --disable-pip-version-check --no-input --cache-dir "$opt/pip-cache" --quiet -r "$wanted")
  sync
  touch "$venv/complete"
fi
rm -rf "$opt/pip-cache"
# The launcher starts this environment or one of a later update of the agent (docs/agent-updates.md). A new installation ends updates of the old one.
install -m 0644 "$here/launcher.py" "$opt/launcher.py.new"
sync
mv "$opt/launcher.py.new" "$opt/launcher.py"
[ "$(readlink -f "$opt/current")" = "$venv" ] || rm -rf "$var/agent"
ln -sfn "$venv" "$opt/current.new"
mv -T "$opt/current.new" "$opt/current"

id -u edge-fl >/dev/null 2>&1 ||
  useradd --system --user-group --home-dir "$var" --no-create-home --shell /usr/sbin/nologin edge-fl
install -d -m 0755 "$etc"
install -d -m 0700 -o edge-fl -g edge-fl "$var" "$etc/identity"
install -m 0644 "$here/config.toml" "$etc/config.toml"
[ ! -f "$here/root.json" ] || install -m 0644 "$here/root.json" "$etc/root.json"

# Move the identity off the FAT partition, which anyone with the card can read. (Flash memory cannot be wiped reliably.)
# If the same identity was installed before, keep the installed one: the device may have renewed its certificate since.
if [ -f "$here/identity/client.crt" ]; then
  identity=$(sha256sum <"$here/identity/client.crt")
  if [ "$identity" != "$(cat "$opt/identity.sha256" 2>/dev/null)" ]; then
    rm -f "$etc"/identity/*
    install -m 0600 -o edge-fl -g edge-fl "$here"/identity/* "$etc/identity/"
    echo "$identity" >"$opt/identity.sha256"
  fi
  sync
fi
rm -rf "$here/identity"

# Move the pictures from the bundle to the agent's data folder. A new folder, and what is copied, belong to the Pi's user: the one
# of sudo, else id 1000, the user of Raspberry Pi OS whatever its name.
user=${SUDO_UID:-0}
[ "$user" != 0 ] || user=1000
if [ -n "$images" ] && [ ! -d "$images" ]; then
  install -d -m 0755 -o "$user" "$images.new"
  mv -T "$images.new" "$images"
fi
if [ -n "$images" ] && [ -d "$here/images" ]; then
  cp -R "$here/images/." "$images/"
  for class in "$here"/images/*; do
    copied="$images/${class##*/}"
    [ -e "$copied" ] || continue
    chown -R "$user" "$copied"
    chmod -R a+rX "$copied"
  done
  sync
  rm -rf "$here/images"
fi
# The agent's group shares the pictures with the Pi's user: each can add, label and delete what the other has added.
if [ -n "$images" ]; then
  if name=$(id -un "$user" 2>/dev/null); then usermod -a -G edge-fl "$name"; fi
  python3 "$here/shared.py" edge-fl "$images" || echo "edge-fl: $images stays as it is; 'sudo edge-fl device share' shares it"
fi

# Move the release in the bundle to where the settings name it as a mirror.
if [ -d "$here/releases" ]; then
  rm -rf "$opt/releases.new"
  cp -R "$here/releases" "$opt/releases.new"
  chmod -R a+rX "$opt/releases.new"
  sync
  rm -rf "$opt/releases"
  mv -T "$opt/releases.new" "$opt/releases"
  rm -rf "$here/releases"
fi

# Command `edge-fl` on the path, with the agent's folder as its default.
cat >/usr/local/bin/edge-fl <<END
#!/bin/sh
export EDGE_FL_DIR="\${EDGE_FL_DIR:-$var}" EDGE_FL_CONFIG="\${EDGE_FL_CONFIG:-$etc/config.toml}"
exec $opt/current/bin/edge-fl "\$@"
END
chmod 0755 /usr/local/bin/edge-fl

enable edge-fl.service
if [ -f "$here/edge-fl-label.service" ]; then
  install -m 0644 "$here/edge-fl-label.service" "$units/edge-fl-label.service"
  [ "$label" != yes ] || enable edge-fl-label.service
fi
# Disabled, not deleted: without the file, the daemon-reload below would apply the default time limit, and systemd kill this script.
rm -f "$units/multi-user.target.wants/edge-fl-install.service"
cp "$here/bundle.sha256" "$opt/bundle.sha256"
for old in "$opt"/venv-*; do
  [ "$old" = "$venv" ] || rm -rf "$old"
done
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  systemctl restart --no-block edge-fl.service
  [ ! -e "$units/multi-user.target.wants/edge-fl-label.service" ] || systemctl restart --no-block edge-fl-label.service
fi
echo "edge-fl: installed for Python $python"
