// completion. deploy/completion has what it prints, and a test compares the two.
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "ballast/v1/tool.pb.h"
#include "client/cli/cli_command.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

bool NamesFile(absl::string_view value) {
  return absl::StartsWith(value, "FILE") || value == "DIR" || value == "CHECKPOINT";
}

// A positional without its brackets.
std::string Bare(const std::string& positional) {
  return absl::StrReplaceAll(positional, {{"[", ""}, {"]", ""}});
}

std::vector<std::string> NamesOf(const std::vector<Command>& commands) {
  std::vector<std::string> names;
  for (const Command& command : commands) names.push_back(command.spec.name);
  return names;
}

// The tool answers within two seconds or not at all: a shell waits for it.
constexpr char kAsk[] = "jobs --json --timeout=2";
// bash executes what it finds in a list of words, so nothing else than a name gets there.
constexpr char kNames[] =
    "2>/dev/null | sed -n 's/^ *\"name\": \"jobs\\/\\([A-Za-z0-9._-]*\\)\",$/\\1/p'";

std::string BashScript() {
  const std::vector<Command> commands = AllCommands();
  std::string cases;
  std::set<std::string> files;
  std::set<std::string> values;
  for (const Command& command : commands) {
    std::vector<std::string> flags;
    std::vector<std::string> positionals;
    for (const FlagSpec& flag : command.spec.flags) {
      flags.push_back(absl::StrCat("--", flag.name));
      if (!flag.value.empty()) (NamesFile(flag.value) ? files : values).insert(flags.back());
    }
    for (const std::string& each : command.spec.positionals) positionals.push_back(Bare(each));
    absl::StrAppend(&cases, "    ", command.spec.name, ") flags=\"", absl::StrJoin(flags, " "),
                    "\" places=(", absl::StrJoin(positionals, " "), ") ;;\n");
  }
  return absl::StrCat(
      "# bash completion of ballast. Made by: ballast completion bash\n"
      "_ballast() {\n"
      "  COMPREPLY=()\n"
      "  # The shell cuts at ':', as in HOST:PORT, which is put together again.\n"
      "  local words=() i\n"
      "  for ((i = 0; i <= COMP_CWORD; ++i)); do\n"
      "    if ((i > 1)) && [[ ${COMP_WORDS[i]} == :* || ${COMP_WORDS[i - 1]} == *: ]]; then\n"
      "      words[-1]+=${COMP_WORDS[i]}\n"
      "    else\n"
      "      words+=(\"${COMP_WORDS[i]}\")\n"
      "    fi\n"
      "  done\n"
      "  local at=$((${#words[@]} - 1)) word=${COMP_WORDS[COMP_CWORD]}\n"
      "  local before=${words[at - 1]}\n"
      "  # Of --flag=VALUE it makes three words.\n"
      "  if [[ $word == = ]]; then word=''; elif [[ $before == = ]]; then "
      "before=${words[at - 2]}; fi\n"
      "  local commands=\"",
      absl::StrJoin(NamesOf(commands), " "),
      "\"\n"
      "  local files=\" ",
      absl::StrJoin(files, " "), " \" values=\" ", absl::StrJoin(values, " "),
      " \"\n"
      "  local flags='' places=() place=0 flag ask=(\"${words[0]}\" ",
      kAsk,
      ")\n"
      "  if ((at == 1)); then\n"
      "    mapfile -t COMPREPLY < <(compgen -W \"$commands help --help --version\" -- \"$word\")\n"
      "    return\n"
      "  fi\n"
      "  case ${words[1]} in\n",
      cases,
      "    help) places=(COMMAND) ;;\n"
      "  esac\n"
      "  if [[ $files == *\" $before \"* ]]; then\n"
      "    mapfile -t COMPREPLY < <(compgen -f -- \"$word\")\n"
      "    return\n"
      "  fi\n"
      "  if [[ $values == *\" $before \"* ]]; then return; fi\n"
      "  if [[ $word == -* ]]; then\n"
      "    mapfile -t COMPREPLY < <(compgen -W \"$flags\" -- \"$word\")\n"
      "    return\n"
      "  fi\n"
      "  for ((i = 2; i < at; ++i)); do\n"
      "    flag=${words[i]}\n"
      "    if [[ $files$values == *\" $flag \"* ]]; then\n"
      "      ((i += 1))\n"
      "      if [[ ${words[i]} == = ]]; then ((i += 1)); fi\n"
      "      case $flag in --service | --tls-* | --token-file) ask+=(\"$flag=${words[i]}\") ;; "
      "esac\n"
      "    elif [[ $flag != -* ]]; then\n"
      "      ((place += 1))\n"
      "    fi\n"
      "  done\n"
      "  case ${places[place]-} in\n"
      "    JOB) mapfile -t COMPREPLY < <(compgen -W \"$(\"${ask[@]}\" ",
      kNames,
      ")\" -- \"$word\") ;;\n"
      "    COMMAND) mapfile -t COMPREPLY < <(compgen -W \"$commands\" -- \"$word\") ;;\n"
      "    SHELL) mapfile -t COMPREPLY < <(compgen -W \"bash zsh\" -- \"$word\") ;;\n"
      "    DIR | CHECKPOINT | SPEC) mapfile -t COMPREPLY < <(compgen -f -- \"$word\") ;;\n"
      "  esac\n"
      "}\n"
      "complete -o filenames -F _ballast ballast\n");
}

// Within single quotes, and what _arguments would read as its own.
std::string ZshText(const std::string& text) {
  return absl::StrReplaceAll(text, {{"'", "'\\''"}, {"[", "\\["}, {"]", "\\]"}, {":", "\\:"}});
}

std::string ZshValue(const std::string& value) {
  if (NamesFile(value) || value == "SPEC") return "_files";
  if (value == "JOB") return "_ballast_jobs";
  return value == "SHELL" ? "(bash zsh)" : " ";
}

std::string ZshScript() {
  const std::vector<Command> commands = AllCommands();
  std::string described;
  std::string cases;
  for (const Command& command : commands) {
    absl::StrAppend(&described, "    '", command.spec.name, ":", ZshText(command.spec.summary),
                    "'\n");
    absl::StrAppend(&cases, "    ", command.spec.name, ") _arguments");
    for (const FlagSpec& flag : command.spec.flags) {
      absl::StrAppend(&cases, " \\\n      '--", flag.name, flag.value.empty() ? "" : "=", "[",
                      ZshText(flag.help), "]");
      if (!flag.value.empty()) {
        absl::StrAppend(&cases, ":", ZshText(flag.value), ":", ZshValue(flag.value));
      }
      absl::StrAppend(&cases, "'");
    }
    for (const std::string& positional : command.spec.positionals) {
      const std::string name = Bare(positional);
      absl::StrAppend(&cases, " \\\n      '", name == positional ? ":" : "::", name, ":",
                      ZshValue(name), "'");
    }
    absl::StrAppend(&cases, " ;;\n");
  }
  return absl::StrCat(
      "#compdef ballast\n"
      "# zsh completion of ballast. Made by: ballast completion zsh\n"
      "_ballast_jobs() {\n"
      "  local -a jobs\n"
      "  jobs=(${(f)\"$(ballast ",
      kAsk, " ", kNames,
      ")\"})\n"
      "  compadd -a jobs\n"
      "}\n"
      "_ballast() {\n"
      "  local -a commands=(\n",
      described,
      "    'help:this text, or the flags of a command'\n"
      "  )\n"
      "  if ((CURRENT == 2)); then\n"
      "    _describe command commands\n"
      "    return\n"
      "  fi\n"
      "  shift words\n"
      "  ((CURRENT -= 1))\n"
      "  case $words[1] in\n",
      cases,
      "    help) _describe command commands ;;\n"
      "  esac\n"
      "}\n"
      "_ballast \"$@\"\n");
}

absl::StatusOr<Action> PrepareCompletion(const Arguments& arguments) {
  const std::string& shell = arguments.positional(0);
  if (shell != "bash" && shell != "zsh") {
    return absl::InvalidArgumentError(
        absl::StrCat("no completion for '", shell, "'; expected bash or zsh"));
  }
  return [shell](Service& /*service*/, bool json) -> absl::StatusOr<std::string> {
    v1::CompletionScript completion;
    completion.set_shell(shell);
    completion.set_script(shell == "bash" ? BashScript() : ZshScript());
    return json ? proto::ToJson(completion) : completion.script();
  };
}

}  // namespace

Command CompletionCommand() {
  return {.spec = {.name = "completion",
                   .positionals = {"SHELL"},
                   .summary = "a script that completes commands, flags and jobs in a shell",
                   .details = "SHELL is bash or zsh. In bash: source <(ballast completion bash). "
                              "The packages install both.",
                   .flags = {}},
          .asks_service = false,
          .prepare = PrepareCompletion};
}

}  // namespace ballast::client::cli
