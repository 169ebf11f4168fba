#include "client/cli/cli_arguments.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ballast::client::cli {

absl::StatusOr<Arguments> Arguments::Parse(const CommandSpec& spec,
                                           absl::Span<const std::string> words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    // A single dash does not begin a flag: there are no short ones.
    if (!absl::StartsWith(word, "--") || word.size() == 2) {
      arguments.positionals_.push_back(word);
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    const auto flag = std::find_if(spec.flags.begin(), spec.flags.end(),
                                   [&](const FlagSpec& known) { return known.name == name; });
    if (flag == spec.flags.end()) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag --", name));
    }
    const bool has_value = equals != std::string::npos;
    if (flag->value.empty()) {
      if (has_value) return absl::InvalidArgumentError(absl::StrCat("--", name, " has no value"));
      // Where a flag is given twice, the last one counts.
      arguments.flags_[name] = "";
    } else if (has_value) {
      arguments.flags_[name] = word.substr(equals + 1);
    } else if (i + 1 < words.size()) {
      // The next word is the value whatever it looks like, so that it may begin with dashes.
      arguments.flags_[name] = words[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value: ", flag->value));
    }
  }
  // Arguments that may be left out are the last ones of their command.
  while (arguments.positionals_.size() < spec.positionals.size()) {
    if (absl::StartsWith(spec.positionals[arguments.positionals_.size()], "[")) {
      arguments.positionals_.emplace_back();
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("missing argument ", spec.positionals[arguments.positionals_.size()]));
  }
  if (arguments.positionals_.size() > spec.positionals.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unexpected argument '", arguments.positionals_[spec.positionals.size()], "'"));
  }
  return arguments;
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

absl::StatusOr<std::optional<bool>> Arguments::Bool(const std::string& flag) const {
  if (!Has(flag)) return std::nullopt;
  bool value = false;
  if (!absl::SimpleAtob(flags_.at(flag), &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, " is '", flags_.at(flag), "', expected true or false"));
  }
  return value;
}

std::string HelpText(const CommandSpec& spec) {
  std::string text = absl::StrCat("usage: ballast ", spec.name);
  for (const std::string& positional : spec.positionals) absl::StrAppend(&text, " ", positional);
  absl::StrAppend(&text, " [flags]\n\n", spec.summary, "\n");
  if (!spec.details.empty()) absl::StrAppend(&text, "\n", spec.details, "\n");
  absl::StrAppend(&text, "\nflags:\n");
  size_t width = 0;
  const auto left = [](const FlagSpec& flag) {
    return absl::StrCat("--", flag.name, flag.value.empty() ? "" : " ", flag.value);
  };
  for (const FlagSpec& flag : spec.flags) width = std::max(width, left(flag).size());
  for (const FlagSpec& flag : spec.flags) {
    const std::string name = left(flag);
    absl::StrAppend(&text, "  ", name, std::string(width - name.size() + 2, ' '), flag.help, "\n");
  }
  return text;
}

}  // namespace ballast::client::cli
