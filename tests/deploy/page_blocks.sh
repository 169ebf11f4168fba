#!/usr/bin/env bash
# Writes the code blocks of a page's section to OUT/1, OUT/2 and so on, so that a test runs what the page says.
#
#   tests/deploy/page_blocks.sh PAGE SECTION OUT
set -euo pipefail

(($# == 3)) || { echo "page_blocks.sh: expected PAGE SECTION OUT" >&2; exit 2; }
mkdir -p "$3"
awk -v heading="## $2" -v out="$3" '
  $0 == heading { inside = 1; next }
  inside && /^## / { exit }
  inside && /^```/ { open = !open; blocks += open; next }
  inside && open { print > (out "/" blocks) }' "$1"
[[ -s $3/1 ]] || { echo "page_blocks.sh: $1 has no section '$2' with code" >&2; exit 1; }
