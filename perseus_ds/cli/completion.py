"""``perseus-ds completion``: a script with which a shell completes commands, arguments, choices and paths."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from perseus_ds.cli.arguments import argument, arguments_of
from perseus_ds.cli.main import COMMANDS, command_of


class Shell(Enum):
    """Which shell reads the script."""

    bash = "for ~/.bashrc"
    zsh = "for ~/.zshrc"


# zsh can run a completion function of bash. They differ in that = ends a word in bash, which replaces only what comes
# after it, and in that zsh's compgen -f completes the whole word, key= included.
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
_perseus_ds_paths() {{
    local path
    for path in "$1"*; do
        [ -e "$path" ] && echo "$path"
    done
}}

_perseus_ds() {{
    local line=${{COMP_LINE:0:$COMP_POINT}} command=${{COMP_WORDS[1]}} commands="{commands}"
    local current=${{line##*[[:space:]]}} words= choices= key value
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "$commands help --help --version" -- "$current"))
        return
    fi
    case $command in
        help) words="$commands" ;;
{arguments}
    esac
    if [[ $current != *=* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current") $(_perseus_ds_paths "$current"))
        [[ ${{COMPREPLY[*]}} == *= ]] && compopt -o nospace 2>/dev/null
        return
    fi
    key=${{current%%=*}} value=${{current#*=}}
    case $command.$key in
{choices}
    esac
    if [ -n "$choices" ]; then
        COMPREPLY=($(compgen -W "$choices" -- "$value"))
    else
        COMPREPLY=($(_perseus_ds_paths "$value"))
        compopt -o filenames 2>/dev/null
    fi
    [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${{COMPREPLY[@]/#/$key=}}")
}}
complete -F _perseus_ds perseus-ds"""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes commands, arguments and their values in a shell."""

    examples = (
        'eval "$(perseus-ds completion bash)"   # in ~/.bashrc',
        'eval "$(perseus-ds completion zsh)"    # in ~/.zshrc',
    )

    shell: Shell = argument("which shell reads the script", word=True)

    def execute(self) -> int:
        words, choices, free = [], [], []
        for command in COMMANDS:
            declared = arguments_of(command_of(command)).values()
            follow = [choice for each in declared if each.word for choice in each.choices]
            follow += [f"--{each.name}" if each.is_switch else f"{each.name}=" for each in declared]
            words.append(f'        {command}) words="{" ".join(follow)} --help" ;;')
            for each in declared:
                if each.choices:
                    choices.append(f'        {command}.{each.name}) choices="{" ".join(each.choices)}" ;;')
                elif each.type is not Path:  # values that cannot be completed
                    free.append(f"{command}.{each.name}")
        choices.append(f"        {'|'.join(free)}) return ;;")
        script = _SCRIPT.format(commands=" ".join(COMMANDS), arguments="\n".join(words), choices="\n".join(choices))
        print(f"{_ZSH if self.shell is Shell.zsh else ''}{script}")
        return 0
