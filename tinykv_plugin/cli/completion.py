"""``tinykv completion``: a script that teaches a shell the commands and flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .flags import kv_flags
from .mlx_lm_commands import mlx_lm_commands
from .parser import command_parser

SHELLS = ("bash", "zsh", "fish")

# Options of our own commands, beside the --kv- flags.
OWN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "run": ("-m",),
    "demo": ("--model", "--max-tokens"),
    "bench": ("--model", "--quick", "--output", "--compare"),
    "inspect": ("--trust-remote-code", "--memory", "--context", "--concurrency"),
    "plugins": (),
    "selftest": ("--contexts", "--batches"),
    "top": ("--url", "--once"),
    "completion": SHELLS,
}
WITHOUT_KV_FLAGS = ("plugins", "top", "completion")

BASH = """\
_tinykv() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='{commands}'
    else
        case $command in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _tinykv tinykv
"""


def completion(argv: Sequence[str]) -> int:
    """Print the script."""
    description = (
        'Print a completion script. In ~/.bashrc: eval "$(tinykv completion bash)"; in ~/.zshrc the same with zsh; '
        "in config.fish: tinykv completion fish | source"
    )
    parser = command_parser("completion", description, kv_flags=False)
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(argv).shell
    words = words_by_command()
    if shell == "fish":
        print(fish_script(words), end="")
        return 0
    if shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(bash_script(words), end="")
    return 0


def words_by_command() -> dict[str, Sequence[str]]:
    """What may follow each command."""
    flags = tuple(kv_flags())
    words: dict[str, Sequence[str]] = {
        command.name: (*command.options(), *(flags if command.keeps_kv else ()))
        for command in mlx_lm_commands().values()
    }
    for name, options in OWN_OPTIONS.items():
        words[name] = options if name in WITHOUT_KV_FLAGS else (*options, *flags)
    return words


def bash_script(words: Mapping[str, Sequence[str]]) -> str:
    """For bash, and for zsh with its bashcompinit."""
    cases = "\n".join(f"            {name}) words='{' '.join(found)}' ;;" for name, found in words.items() if found)
    return BASH.format(commands=" ".join([*words, "--help", "--version"]), cases=cases)


def fish_script(words: Mapping[str, Sequence[str]]) -> str:
    """For fish, which completes long options by their names."""
    lines = [f"complete -c tinykv -n __fish_use_subcommand -f -a '{' '.join(words)}'"]
    for name, found in words.items():
        for word in found:
            kind = f"-l {word.removeprefix('--')}" if word.startswith("--") else f"-a '{word}'"
            lines.append(f"complete -c tinykv -n '__fish_seen_subcommand_from {name}' {kind}")
    return "\n".join(lines) + "\n"
