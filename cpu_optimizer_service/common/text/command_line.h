// A program's flags, which CLI11 reads from its command line, the environment and a file.
//
//   CommandLine line("ballastd", "the optimizer service", VersionAndBuild());
//   line.Group("Memory");
//   line.Add("drain-seconds", drain_seconds, "How long steps may take");
//   BALLAST_ASSIGN_OR_RETURN(const std::string answer, line.Parse({argv + 1, argv + argc}));
//
// Flags are --name VALUE or --name=VALUE, with - or _ in the name; a switch is --name, --noname or
// --name=BOOL. If a flag is given more than once, the last one counts. Thread-compatible.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_COMMAND_LINE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_COMMAND_LINE_H_

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast {

class CommandLine {
 public:
  // `about` is the first part of the help. An empty `version` makes no flag --version.
  CommandLine(const std::string& program, const std::string& about, const std::string& version);

  // The title of the following flags.
  void Group(const std::string& title) { app_.option_defaults()->group(title); }
  // `variable` has the default, and outlives this. A bool is a switch. The name has dashes.
  template <typename T>
  CLI::Option* Add(const std::string& name, T& variable, const std::string& help) {
    if constexpr (std::is_same_v<T, bool>) {
      values_[name] = variable ? "true" : "false";
      return app_.add_flag("--" + name + ",!--no" + name, variable, help)
          ->default_str(values_[name]);
    } else {
      CLI::Option* const option = app_.add_option("--" + name, variable, help);
      values_[name] = option->get_default_str();
      return option;
    }
  }
  // A number within bounds.
  template <typename T>
  void Add(const std::string& name, T& variable, T least, T most, const std::string& help) {
    Add(name, variable, help)->check(CLI::Range(least, most));
  }
  // `take` reads a text; it throws CLI::ValidationError for a bad one. `text` is the default.
  CLI::Option* Add(const std::string& name, std::function<void(const std::string&)> take,
                   const std::string& text, const std::string& help) {
    values_[name] = text;
    return app_.add_option_function<std::string>("--" + name, take, help)->default_str(text);
  }
  // One of the words.
  template <typename T>
  void Add(const std::string& name, T& variable, const std::map<std::string, T>& choices,
           const std::string& help) {
    const auto is_default = [&](const auto& choice) { return choice.second == variable; };
    Add(
        name, [&variable, choices](const std::string& word) { variable = choices.at(word); },
        std::find_if(choices.begin(), choices.end(), is_default)->first, help)
        ->check(CLI::IsMember(choices));
  }
  // "[DIR]" is optional, and empty by default. Optional ones come last.
  void AddArgument(const std::string& name, std::string& variable);

  // Sets the variables. For --help and --version it returns what the program prints instead of its
  // work; otherwise an empty text. INVALID_ARGUMENT, in one line: an unknown flag (with a similar
  // known one), a bad value, too few or too many arguments.
  absl::StatusOr<std::string> Parse(const std::vector<std::string>& words);
  // The same for a file of lines `name = value`. Lines that begin with # are ignored. The file is
  // refused if other users may write it, if it has a flag twice, or if it has the flag `config`.
  absl::Status ReadFile(const std::string& path);
  // The same for variables such as BALLASTD_DRAIN_SECONDS. Variables without a flag are ignored.
  absl::Status ReadEnvironment(absl::string_view prefix);

  // Whether the last call of Parse had this flag.
  bool Has(const std::string& name) const { return app_.get_option("--" + name)->count() > 0; }
  // All flags by name, with their given or default values.
  const std::map<std::string, std::string>& values() const { return values_; }

 private:
  absl::Status Refused(absl::string_view what, absl::string_view name) const;

  CLI::App app_;
  std::map<std::string, std::string> values_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_TEXT_COMMAND_LINE_H_
