// The command line of one subcommand: positional arguments, and flags as in command_line.h.
#ifndef BALLAST_CLIENT_CLI_CLI_ARGUMENTS_H_
#define BALLAST_CLIENT_CLI_CLI_ARGUMENTS_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast::client::cli {

struct FlagSpec {
  std::string name;   // Without the dashes.
  std::string value;  // The name of its value in the help; empty: a switch.
  std::string help;
};

struct CommandSpec {
  std::string name;
  std::vector<std::string> positionals;  // "[DIR]" is optional, and empty by default.
  std::string summary;                   // One line.
  std::string details;                   // For the command's own help; may be empty.
  std::vector<FlagSpec> flags;
};

class Arguments {
 public:
  // For --help, returns what to print instead of the command's work; otherwise an empty text.
  // INVALID_ARGUMENT for an unknown flag, a missing value, too few or too many positionals.
  absl::StatusOr<std::string> Parse(const CommandSpec& spec, const std::vector<std::string>& words);

  const std::string& positional(size_t index) const { return positionals_[index]; }
  bool Has(const std::string& flag) const { return flags_.count(flag) > 0; }
  std::string Get(const std::string& flag, const std::string& otherwise) const;
  // INVALID_ARGUMENT if the value is not a number, or not true or false. nullopt if the flag is not
  // given.
  absl::StatusOr<std::optional<double>> Number(const std::string& flag) const;
  absl::StatusOr<std::optional<int32_t>> Integer(const std::string& flag) const;
  absl::StatusOr<std::optional<bool>> Bool(const std::string& flag) const;

 private:
  std::vector<std::string> positionals_;
  std::map<std::string, std::string> flags_;
};

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_ARGUMENTS_H_
