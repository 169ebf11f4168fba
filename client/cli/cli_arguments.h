// The command line of one subcommand: positional arguments, --flag VALUE, --flag=VALUE, --switch.
//
// Not Abseil's flags: those belong to the process, not to a subcommand (`--out` has two meanings
// here), and their parser ends the process on an error instead of returning it.
#ifndef BALLAST_CLIENT_CLI_CLI_ARGUMENTS_H_
#define BALLAST_CLIENT_CLI_CLI_ARGUMENTS_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::client::cli {

struct FlagSpec {
  std::string name;   // Without the dashes.
  std::string value;  // The name of its value in the help; empty: a switch.
  std::string help;
};

struct CommandSpec {
  std::string name;
  std::vector<std::string> positionals;  // "[DIR]" may be left out, and is empty then.
  std::string summary;                   // One line.
  std::string details;                   // For the command's own help; empty: none.
  std::vector<FlagSpec> flags;
};

class Arguments {
 public:
  // INVALID_ARGUMENT for an unknown flag, a missing value, too few or too many positionals.
  static absl::StatusOr<Arguments> Parse(const CommandSpec& spec,
                                         absl::Span<const std::string> words);

  const std::string& positional(size_t index) const { return positionals_[index]; }
  bool Has(const std::string& flag) const { return flags_.count(flag) > 0; }
  std::string Get(const std::string& flag, const std::string& otherwise) const;
  // INVALID_ARGUMENT if the value is not a number, or not true or false. nullopt if the flag is not
  // given.
  absl::StatusOr<std::optional<double>> Number(const std::string& flag) const;
  absl::StatusOr<std::optional<bool>> Bool(const std::string& flag) const;

 private:
  std::vector<std::string> positionals_;
  std::map<std::string, std::string> flags_;
};

// "usage: ballast state JOB PARAMETER [--plane PLANE] ..." and what each flag does.
std::string HelpText(const CommandSpec& spec);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_ARGUMENTS_H_
