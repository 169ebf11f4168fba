#include "client/cli/cli_arguments.h"

#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/command_line.h"

namespace ballast::client::cli {

absl::StatusOr<std::string> Arguments::Parse(const CommandSpec& spec,
                                             const std::vector<std::string>& words) {
  CommandLine line(
      absl::StrCat("ballast ", spec.name),
      absl::StrCat(spec.summary, spec.details.empty() ? "" : "\n\n", spec.details, "\n"), "");
  positionals_.resize(spec.positionals.size());
  for (size_t i = 0; i < positionals_.size(); ++i) {
    line.AddArgument(spec.positionals[i], positionals_[i]);
  }
  std::map<std::string, bool> switches;
  std::map<std::string, std::string> texts;
  for (const FlagSpec& flag : spec.flags) {
    if (flag.name == "help") continue;
    if (flag.value.empty()) {
      line.Add(flag.name, switches[flag.name], flag.help)->default_str("");
    } else {
      line.Add(flag.name, texts[flag.name], flag.help)
          ->type_name(flag.value)
          ->option_text(" " + flag.value);
    }
  }
  BALLAST_ASSIGN_OR_RETURN(std::string answer, line.Parse(words));
  for (const auto& [name, is_on] : switches) {
    if (is_on) flags_[name] = "";
  }
  for (const auto& [name, text] : texts) {
    if (line.Has(name)) flags_[name] = text;
  }
  return answer;
}

std::string Arguments::Get(const std::string& flag, const std::string& otherwise) const {
  const auto it = flags_.find(flag);
  return it == flags_.end() ? otherwise : it->second;
}

absl::StatusOr<std::optional<double>> Arguments::Number(const std::string& flag) const {
  if (!Has(flag)) return std::nullopt;
  double value = 0;
  if (!absl::SimpleAtod(flags_.at(flag), &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, " is '", flags_.at(flag), "', expected a number"));
  }
  return value;
}

absl::StatusOr<std::optional<int32_t>> Arguments::Integer(const std::string& flag) const {
  if (!Has(flag)) return std::nullopt;
  int32_t value = 0;
  if (!absl::SimpleAtoi(flags_.at(flag), &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, " is '", flags_.at(flag), "', expected a whole number"));
  }
  return value;
}

absl::StatusOr<std::optional<bool>> Arguments::Bool(const std::string& flag) const {
  if (!Has(flag)) return std::nullopt;
  bool value = false;
  if (!absl::SimpleAtob(flags_.at(flag), &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, " is '", flags_.at(flag), "', expected true or false"));
  }
  return value;
}

}  // namespace ballast::client::cli
