#!/usr/bin/env bash
# Build the site strictly into site/. A workflow for main or for a tag also publishes it on the branch gh-pages.
#
#   bash ci/docs.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
make_environment docs
export NO_MKDOCS_2_WARNING=1
"$VENV_PYTHON" -m mkdocs build --strict
if [ "${GITHUB_EVENT_NAME:-}" = push ]; then
    git config user.name docs
    git config user.email docs@users.noreply.github.com
    case "$GITHUB_REF" in
        refs/tags/v*) "$VENV_PYTHON" -m mike deploy --push --update-aliases "${GITHUB_REF_NAME#v}" latest ;;
        *) "$VENV_PYTHON" -m mike deploy --push dev ;;
    esac
fi
