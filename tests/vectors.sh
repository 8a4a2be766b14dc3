#!/bin/sh
# Fetches what other engines' tests compare tokenizers and chat templates with: llama.cpp's, from the source package of
# llama-cpp-python, into $NANOENGINE_VECTORS or ~/.cache/nanoengine/vectors (100 MB). Tests that want them are skipped without.
set -eu
target=${NANOENGINE_VECTORS:-$HOME/.cache/nanoengine/vectors}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# pip unpacks the package, fails for want of its build tools, and leaves the files: nothing of it is built or run.
TMPDIR=$work "${PYTHON:-python}" -m pip download --quiet --no-deps --no-clean --no-build-isolation --no-binary :all: \
    -d "$work" llama-cpp-python==0.3.36 || true
models=$(find "$work" -type d -path '*/vendor/llama.cpp/models')
mkdir -p "$target/vocab" "$target/templates"
cp "$models"/ggml-vocab-* "$target/vocab"
cp "$models"/templates/*.jinja "$target/templates"
echo "$(ls "$target/vocab" | wc -l) files of vocabularies and $(ls "$target/templates" | wc -l) templates in $target"
