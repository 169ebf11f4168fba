#include "cpu_optimizer_service/common/text/command_line.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "cpu_optimizer_service/common/text/suggestions.h"

namespace ballast {
namespace {

constexpr size_t kHelpColumns = 96;

std::string WithDashes(absl::string_view name) { return absl::StrReplaceAll(name, {{"_", "-"}}); }

// CLI11's own does not break long lines, and has two empty lines between groups.
class Formatter : public CLI::Formatter {
  std::string make_usage(const CLI::App* app, std::string name) const override {
    return CLI::Formatter::make_usage(app, std::move(name)) + "\n";
  }
  std::string make_group(std::string title, bool is_positional,
                         std::vector<const CLI::Option*> options) const override {
    return CLI::Formatter::make_group(std::move(title), is_positional, std::move(options))
        .substr(1);
  }
  std::string make_positionals(const CLI::App* /*app*/) const override { return ""; }
  std::string make_option(const CLI::Option* option, bool /*is_positional*/) const override {
    const bool is_switch = option->get_items_expected_max() == 0;
    std::string text = option->get_description();
    if (const std::string value = option->get_default_str(); !value.empty()) {
      absl::StrAppend(&text, " (", value, ")");
    }
    std::string lines;
    std::string line = absl::StrCat("  --", option->get_lnames().front(),
                                    option->get_option_text().empty() && !is_switch ? "=" : "",
                                    option->get_option_text(), "  ");
    for (const absl::string_view word : absl::StrSplit(text, ' ')) {
      if (line.size() + 1 + word.size() > kHelpColumns) {
        absl::StrAppend(&lines, line, "\n");
        line = "       ";
      }
      absl::StrAppend(&line, " ", word);
    }
    return absl::StrCat(lines, line, "\n");
  }
};

bool IsInteger(absl::string_view type) {
  return absl::StartsWith(type, "UINT") || absl::StartsWith(type, "INT");
}

// CLI11 takes an empty text for 0 or true, -1 for the largest unsigned number, and a NaN within bounds.
// Empty: the value is valid.
std::string ExpectedInsteadOf(const CLI::Option& option, const std::string& text) {
  bool is_on = false;
  if (option.get_items_expected_max() == 0) {
    return absl::SimpleAtob(text, &is_on) ? "" : "true or false";
  }
  const std::string type = option.get_type_name();
  const bool is_unsigned = absl::StartsWith(type, "UINT");
  if (!IsInteger(type) && !absl::StartsWith(type, "FLOAT")) return "";
  double number = 0;
  if (!absl::SimpleAtod(text, &number) || std::isnan(number)) return "a number";
  return is_unsigned && number < 0 ? "0 or more" : "";
}

// CLI11 takes a number with a leading zero for an octal one.
std::string InDecimal(const CLI::Option& option, std::string text) {
  if (!IsInteger(option.get_type_name())) return text;
  const size_t first = text.find_first_not_of("+-");
  const size_t digits = text.find_first_not_of('0', first);
  if (first == std::string::npos || digits == first) return text;
  const bool is_zero = digits == std::string::npos || !absl::ascii_isdigit(text[digits]);
  if (!is_zero) text.erase(first, digits - first);
  return text;
}

}  // namespace

CommandLine::CommandLine(const std::string& program, const std::string& about,
                         const std::string& version)
    : app_(about, program) {
  app_.formatter(std::make_shared<Formatter>());
  app_.option_defaults()->always_capture_default()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  Group("flags");
  app_.set_help_flag("--help", "print this text");
  if (!version.empty()) {
    app_.set_version_flag("--version", absl::StrCat(program, " ", version, "\n"),
                          "print which build this is");
  }
}

void CommandLine::AddArgument(const std::string& name, std::string& variable) {
  app_.add_option(absl::StrReplaceAll(name, {{"[", ""}, {"]", ""}}), variable)
      ->required(!absl::StartsWith(name, "["));
}

absl::Status CommandLine::Refused(absl::string_view what, absl::string_view name) const {
  std::vector<std::string> names;
  for (const auto& [known, value] : values_) names.push_back(known);
  const std::vector<std::string> near = Suggestions(WithDashes(name), names);
  return absl::InvalidArgumentError(absl::StrCat(
      what, near.empty() ? "; see --help" : absl::StrCat("; did you mean ", near.front(), "?")));
}

absl::StatusOr<std::string> CommandLine::Parse(const std::vector<std::string>& words) {
  // CLI11 would take the next word as the value of `--name=`, and knows no _ in place of a -.
  std::vector<std::string> plain;
  for (size_t i = 0; i < words.size(); ++i) {
    if (!absl::StartsWith(words[i], "--")) {
      plain.push_back(words[i]);
      continue;
    }
    const size_t equals = words[i].find('=');
    plain.push_back(WithDashes(words[i].substr(0, equals)));
    const CLI::Option* const option = app_.get_option_no_throw(plain.back());
    const bool takes_next = option != nullptr && option->get_items_expected_max() > 0;
    std::string value;
    if (equals != std::string::npos) {
      value = words[i].substr(equals + 1);
    } else if (takes_next && i + 1 < words.size()) {
      value = words[++i];  // Whatever it begins with.
    } else {
      continue;
    }
    const std::string expected = option == nullptr ? "" : ExpectedInsteadOf(*option, value);
    if (!expected.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(option->get_name(), ": bad value '", value, "'; expected ", expected));
    }
    if (takes_next) {
      plain.push_back(option == nullptr ? value : InDecimal(*option, value));
    } else {
      absl::StrAppend(&plain.back(), "=", value);
    }
  }
  std::reverse(plain.begin(), plain.end());  // As CLI11 takes them.
  try {
    app_.parse(std::move(plain));
  } catch (const CLI::CallForHelp&) {
    return absl::StrCat(absl::StripTrailingAsciiWhitespace(app_.help()), "\n");
  } catch (const CLI::CallForVersion&) {
    return app_.version();
  } catch (const CLI::ExtrasError&) {
    const std::string word = app_.remaining().front();
    absl::string_view name = word;
    if (absl::ConsumePrefix(&name, "--")) {
      return Refused(absl::StrCat("unknown flag '", word, "'"), name.substr(0, name.find('=')));
    }
    return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", word, "'; see --help"));
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(absl::StrCat(error.what(), "; see --help"));
  }
  for (auto& [name, value] : values_) {
    if (Has(name)) value = app_.get_option("--" + name)->results().back();
  }
  return "";
}

absl::Status CommandLine::ReadFile(const std::string& path) {
  // Whoever can write it decides who may do what, so nobody but its owner may.
  BALLAST_ASSIGN_OR_RETURN(const std::string contents, ReadCredentialFile(path, Others::kMayRead));
  std::set<std::string> given;
  int number = 0;
  for (const absl::string_view each : absl::StrSplit(contents, '\n')) {
    const std::string where = absl::StrCat(path, ", line ", ++number);
    const absl::string_view line = absl::StripAsciiWhitespace(each);
    if (line.empty() || line.front() == '#') continue;
    const size_t equals = line.find('=');
    if (equals == absl::string_view::npos) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": expected KEY = VALUE"));
    }
    const std::string key = WithDashes(absl::StripAsciiWhitespace(line.substr(0, equals)));
    if (values_.count(key) == 0 || key == "config") {
      return Refused(absl::StrCat(where, ": there is no key '", key, "'"), key);
    }
    if (!given.insert(key).second) {
      return absl::InvalidArgumentError(absl::StrCat(where, ", ", key, " is there twice"));
    }
    const absl::string_view value = absl::StripAsciiWhitespace(line.substr(equals + 1));
    BALLAST_RETURN_IF_ERROR(Annotate(Parse({absl::StrCat("--", key, "=", value)}).status(), where));
  }
  return absl::OkStatus();
}

absl::Status CommandLine::ReadEnvironment(absl::string_view prefix) {
  for (const auto& [name, value] : values_) {
    const std::string variable =
        absl::StrCat(prefix, absl::AsciiStrToUpper(absl::StrReplaceAll(name, {{"-", "_"}})));
    const char* const text = std::getenv(variable.c_str());
    if (text == nullptr) continue;
    BALLAST_RETURN_IF_ERROR(Annotate(Parse({absl::StrCat("--", name, "=", text)}).status(),
                                     absl::StrCat("variable ", variable)));
  }
  return absl::OkStatus();
}

}  // namespace ballast
