#!/bin/sh
# Prints the path of a Python with a version such as 3.10, from PATH or pyenv. Fails if there is none.
for python in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    "$python" -c 'import sys; print(sys.executable)' 2>/dev/null && exit
done
exit 1
