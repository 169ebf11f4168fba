#include "client/cli/cli_arguments.h"

#include <gtest/gtest.h>

#include "tests/support/messages.h"

namespace ballast::client::cli {
namespace {

const CommandSpec kSpec = {.name = "set-group",
                           .positionals = {"JOB", "GROUP"},
                           .summary = "changes things",
                           .details = "",
                           .flags = {{"lr", "NUMBER", "learning rate"},
                                     {"maximize", "BOOL", "true or false"},
                                     {"json", "", "print JSON"}}};

Arguments Parsed(const std::vector<std::string>& words) {
  Arguments arguments;
  EXPECT_EQ(arguments.Parse(kSpec, words).value(), "");
  return arguments;
}

TEST(Arguments, TakesFlagsAnywhereAndInBothForms) {
  const Arguments arguments =
      Parsed({"--json", "gpt", "--lr", "-1e-3", "decay", "--maximize=false", "--maximize=true"});
  EXPECT_EQ(arguments.positional(0), "gpt");
  EXPECT_EQ(arguments.positional(1), "decay");
  EXPECT_TRUE(arguments.Has("json"));
  EXPECT_EQ(arguments.Number("lr").value(), -1e-3);
  EXPECT_EQ(arguments.Bool("maximize").value(), true);
  EXPECT_EQ(arguments.Get("nothing", "otherwise"), "otherwise");
}

TEST(Arguments, AValueMayBeEmptyOrBeginWithDashes) {
  EXPECT_EQ(Parsed({"a", "--lr=", "b"}).Get("lr", "otherwise"), "");
  EXPECT_EQ(Parsed({"a", "--lr", "--json", "b"}).Get("lr", ""), "--json");
}

TEST(Arguments, AbsentFlagsAreNotZero) {
  const Arguments arguments = Parsed({"a", "b"});
  EXPECT_FALSE(arguments.Has("json"));
  EXPECT_EQ(arguments.Number("lr").value(), std::nullopt);
  EXPECT_EQ(arguments.Bool("maximize").value(), std::nullopt);
}

TEST(Arguments, SaysWhatIsWrong) {
  EXPECT_TRUE(Refused(Arguments().Parse(kSpec, {"a", "b", "--rl", "1"}),
                      absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Refused(Arguments().Parse(kSpec, {"a", "b", "--lr"}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Arguments().Parse(kSpec, {"a", "b", "--json=maybe"}),
                      absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Arguments().Parse(kSpec, {"a"}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Refused(Arguments().Parse(kSpec, {"a", "b", "c"}), absl::StatusCode::kInvalidArgument));
  const Arguments arguments = Parsed({"a", "b", "--lr", "fast", "--maximize=2"});
  EXPECT_TRUE(Refused(arguments.Number("lr"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(arguments.Bool("maximize"), absl::StatusCode::kInvalidArgument));
}

TEST(Arguments, AnswersHelpAlsoWhereArgumentsAreMissing) {
  EXPECT_EQ(Arguments().Parse(kSpec, {"a", "--help"}).value(),
            "changes things\n\nUsage: ballast set-group [OPTIONS] JOB GROUP\n\nflags:\n"
            "  --help   print this text\n"
            "  --lr NUMBER   learning rate\n"
            "  --maximize BOOL   true or false\n"
            "  --json   print JSON\n");
}

}  // namespace
}  // namespace ballast::client::cli
