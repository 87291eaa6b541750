#!/usr/bin/env bash
# Bring kustomize and promtool into the folder $1, from Debian's next release, without installing
# them. Tests that use them are skipped where this fails: no Debian, no root, no network.
set -euo pipefail
folder="$1"
release=trixie

[ -x "$folder/usr/bin/kustomize" ] && [ -x "$folder/usr/bin/promtool" ] && exit 0
mkdir -p "$folder/lists/partial" "$folder/archives/partial"
# The archive that this machine is configured for, with another release.
archive="$(sed -nE 's/^URIs: *(\S+\/debian)\/?$/\1/p' /etc/apt/sources.list.d/*.sources | head -n 1)"
[ -n "$archive" ]
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $release main" \
  >"$folder/sources.list"
apt=(apt-get -qq
  -o Dir::Etc::SourceList="$PWD/$folder/sources.list" -o Dir::Etc::SourceParts=-
  -o Dir::State::Lists="$PWD/$folder/lists" -o Dir::Cache="$PWD/$folder"
  -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=1)
"${apt[@]}" update
(cd "$folder" && "${apt[@]}" download kustomize promtool)
for package in "$folder"/*.deb; do dpkg-deb -x "$package" "$folder"; done
