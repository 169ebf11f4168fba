#include "server/ballastd/flag_sources.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/common/text/suggestions.h"

namespace ballast::server {
namespace {

// Abseil notes the file in which a flag is defined: that tells ours from those of libraries.
constexpr char kDefinedIn[] = "ballastd_flags.cc";
constexpr char kConfig[] = "config";
constexpr char kVariablePrefix[] = "BALLASTD_";
constexpr size_t kHelpColumns = 96;

// What the flags are about, in the order of the help. One that is not here is listed at the end.
struct Group {
  absl::string_view title;
  std::vector<absl::string_view> flags;
};
const std::vector<Group>& Groups() {
  static const auto* const groups = new std::vector<Group>{
      {"Where it listens",
       {"listen", "insecure", "metrics_listen", "metrics_insecure", "port_file"}},
      {"Who may do what",
       {"tls_cert", "tls_key", "tls_client_ca", "roles_file", "tokens_file", "allow_paths"}},
      {"Memory and processors",
       {"memory_limit", "threads", "shared_memory", "state_dir", "holder", "most_deaths"}},
      {"Training and checkpoints",
       {"seal_deadline_seconds", "checkpoint_dir", "checkpoint_every", "checkpoint_keep",
        "checkpoint_keep_asked", "forget_after", "drain_seconds"}},
      {"The process itself",
       {"config", "check_config", "user", "upgrade", "check_state", "log_level", "log_format",
        "startup_benchmark", "self_benchmark"}},
  };
  return *groups;
}

// Both spellings, memory-limit and memory_limit, are understood.
std::string WithUnderscores(absl::string_view name) {
  return absl::StrReplaceAll(name, {{"-", "_"}});
}
std::string WithDashes(absl::string_view name) { return absl::StrReplaceAll(name, {{"_", "-"}}); }

// By name; not those of libraries.
const std::map<std::string, absl::CommandLineFlag*>& Flags() {
  static const auto* const flags = [] {
    auto* const own = new std::map<std::string, absl::CommandLineFlag*>;
    for (const auto& [name, flag] : absl::GetAllFlags()) {
      if (absl::EndsWith(flag->Filename(), kDefinedIn)) (*own)[std::string(name)] = flag;
    }
    return own;
  }();
  return *flags;
}

absl::CommandLineFlag* FindFlag(absl::string_view name) {
  const auto found = Flags().find(WithUnderscores(name));
  return found == Flags().end() ? nullptr : found->second;
}

std::string LikeIt(absl::string_view name) {
  std::vector<std::string> names;
  for (const auto& [known, flag] : Flags()) names.push_back(WithDashes(known));
  const std::vector<std::string> near = Suggestions(WithDashes(name), names);
  return near.empty() ? "; see --help" : absl::StrCat("; did you mean ", near.front(), "?");
}

// A flag's value, and who gives it, for a message.
struct Setting {
  absl::CommandLineFlag* flag;
  std::string value;
  std::string source;
};

absl::Status Set(const Setting& setting) {
  std::string error;
  if (setting.flag->ParseFrom(setting.value, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(setting.source, ": bad value '", setting.value,
                                                 "'; it is: ", setting.flag->Help()));
}

// Abseil's own parser would set flags while it reads them, and so before the file that one of them
// names; it ends the process at a mistake, takes flags of libraries, and knows no dash in a name.
absl::StatusOr<std::vector<Setting>> OfCommandLine(const std::vector<std::string>& arguments) {
  std::vector<Setting> settings;
  for (size_t i = 1; i < arguments.size(); ++i) {
    absl::string_view name = arguments[i];
    if (!absl::ConsumePrefix(&name, "--") || name.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument '", arguments[i], "'; see --help"));
    }
    if (name == "help" || name == "helpfull") {
      std::fputs(FlagsHelp().c_str(), stdout);
      std::exit(0);
    }
    if (name == "version") {
      std::printf("ballastd %s\n", VersionAndBuild().c_str());
      std::exit(0);
    }
    const size_t equals = name.find('=');
    bool has_value = equals != absl::string_view::npos;
    std::string value(has_value ? name.substr(equals + 1) : "");
    name = name.substr(0, equals);
    absl::CommandLineFlag* flag = FindFlag(name);
    // A switch alone means true; it never takes the next word as its value.
    if (flag != nullptr && !has_value && flag->IsOfType<bool>()) {
      value = "true";
      has_value = true;
    }
    // --noinsecure is --insecure=false, as Abseil has it. A flag of that whole name comes first.
    absl::string_view without = name;
    if (flag == nullptr && !has_value && absl::ConsumePrefix(&without, "no")) {
      flag = FindFlag(without);
      if (flag != nullptr && !flag->IsOfType<bool>()) flag = nullptr;
      value = "false";
      has_value = flag != nullptr;
    }
    if (flag == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown flag '", arguments[i], "'", LikeIt(name)));
    }
    // Any other flag takes the next word, whatever that begins with.
    if (!has_value && ++i < arguments.size()) {
      value = arguments[i];
      has_value = true;
    }
    const std::string source = absl::StrCat("flag --", WithDashes(flag->Name()));
    if (!has_value) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, " needs a value; it is: ", flag->Help()));
    }
    settings.push_back({.flag = flag, .value = std::move(value), .source = source});
  }
  return settings;
}

std::vector<Setting> OfEnvironment() {
  std::vector<Setting> settings;
  // Only variables of flags are asked for. Others may begin so, too: Kubernetes sets BALLASTD_PORT
  // where a Service has that name.
  for (const auto& [name, flag] : Flags()) {
    const std::string variable = absl::StrCat(kVariablePrefix, absl::AsciiStrToUpper(name));
    const char* const value = std::getenv(variable.c_str());
    if (value == nullptr) continue;
    settings.push_back(
        {.flag = flag, .value = value, .source = absl::StrCat("variable ", variable)});
  }
  return settings;
}

absl::StatusOr<Setting> OfLine(absl::string_view line, const std::string& where) {
  const size_t equals = line.find('=');
  const std::string key(absl::StripAsciiWhitespace(line.substr(0, equals)));
  if (equals == absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": expected KEY = VALUE"));
  }
  absl::CommandLineFlag* const flag = FindFlag(key);
  // A file names no other file.
  if (flag == nullptr || flag->Name() == kConfig) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": there is no key '", key, "'", LikeIt(key)));
  }
  return Setting{.flag = flag,
                 .value = std::string(absl::StripAsciiWhitespace(line.substr(equals + 1))),
                 .source = absl::StrCat(where, ", ", key)};
}

absl::StatusOr<std::vector<Setting>> OfFile(const std::string& path) {
  std::vector<Setting> settings;
  if (path.empty()) return settings;
  // Whoever can write it decides who may do what, so nobody but its owner may.
  BALLAST_ASSIGN_OR_RETURN(const std::string contents, ReadCredentialFile(path, Others::kMayRead));
  // On the command line the last one counts. In a file, where the two may be far apart, it is a
  // mistake.
  std::set<absl::CommandLineFlag*> given;
  int number = 0;
  for (const absl::string_view each : absl::StrSplit(contents, '\n')) {
    const std::string where = absl::StrCat(path, ", line ", ++number);
    const absl::string_view line = absl::StripAsciiWhitespace(each);
    if (line.empty() || line.front() == '#') continue;
    BALLAST_ASSIGN_OR_RETURN(Setting setting, OfLine(line, where));
    if (!given.insert(setting.flag).second) {
      return absl::InvalidArgumentError(absl::StrCat(setting.source, " is there twice"));
    }
    settings.push_back(std::move(setting));
  }
  return settings;
}

// The last one that names a file.
std::string ConfigFile(const std::vector<Setting>& environment,
                       const std::vector<Setting>& command_line) {
  std::string path;
  for (const auto* settings : {&environment, &command_line}) {
    for (const Setting& setting : *settings) {
      if (setting.flag->Name() == kConfig) path = setting.value;
    }
  }
  return path;
}

void AddHelp(const absl::CommandLineFlag& flag, std::string& text) {
  const bool is_switch = flag.IsOfType<bool>();
  std::string line = absl::StrCat("  --", WithDashes(flag.Name()), is_switch ? "" : "=", "   ");
  std::string said = flag.Help();
  if (const std::string value = flag.DefaultValue(); !value.empty()) {
    absl::StrAppend(&said, " (", value, ")");
  }
  for (const absl::string_view word : absl::StrSplit(said, ' ')) {
    if (line.size() + 1 + word.size() > kHelpColumns) {
      absl::StrAppend(&text, line, "\n");
      line = "       ";
    }
    absl::StrAppend(&line, " ", word);
  }
  absl::StrAppend(&text, line, "\n");
}

}  // namespace

absl::Status SetFlags(const std::vector<std::string>& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Setting> command_line, OfCommandLine(arguments));
  const std::vector<Setting> environment = OfEnvironment();
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Setting> file,
                           OfFile(ConfigFile(environment, command_line)));
  // The last one that sets a flag counts. Those before it are set all the same, so that a bad value
  // is found wherever it stands.
  for (const auto* settings : {&file, &environment, &command_line}) {
    for (const Setting& setting : *settings) BALLAST_RETURN_IF_ERROR(Set(setting));
  }
  return absl::OkStatus();
}

std::string FlagsHelp() {
  std::string text =
      "ballastd: the Ballast optimizer service\n\n"
      "A flag --drain-seconds=5 is also a line `drain-seconds = 5` of the file that --config "
      "names, "
      "and\nthe variable BALLASTD_DRAIN_SECONDS. Defaults are in parentheses. --version says which "
      "build this is.\n";
  std::map<std::string, absl::CommandLineFlag*> left = Flags();
  for (const Group& group : Groups()) {
    absl::StrAppend(&text, "\n", group.title, ":\n");
    for (const absl::string_view name : group.flags) {
      const auto found = left.find(std::string(name));
      if (found == left.end()) continue;
      AddHelp(*found->second, text);
      left.erase(found);
    }
  }
  if (!left.empty()) absl::StrAppend(&text, "\nOthers:\n");
  for (const auto& [name, flag] : left) AddHelp(*flag, text);
  return text;
}

std::map<std::string, std::string> FlagValues() {
  std::map<std::string, std::string> values;
  for (const auto& [name, flag] : Flags()) values[name] = flag->CurrentValue();
  return values;
}

}  // namespace ballast::server
