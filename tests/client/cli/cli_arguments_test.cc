#include "client/cli/cli_arguments.h"

#include <gtest/gtest.h>

namespace ballast::client::cli {
namespace {

const CommandSpec kSpec = {.name = "set-group",
                           .positionals = {"JOB", "GROUP"},
                           .summary = "changes things",
                           .details = "",
                           .flags = {{"lr", "NUMBER", "learning rate"},
                                     {"maximize", "BOOL", "true or false"},
                                     {"json", "", "print JSON"}}};

std::string Refusal(const std::vector<std::string>& words) {
  return std::string(Arguments::Parse(kSpec, words).status().message());
}

TEST(Arguments, TakesFlagsAnywhereAndInBothForms) {
  const auto arguments = Arguments::Parse(
      kSpec,
      std::vector<std::string>{"--json", "gpt", "--lr", "-1e-3", "decay", "--maximize=true"});
  ASSERT_TRUE(arguments.ok()) << arguments.status();
  EXPECT_EQ(arguments->positional(0), "gpt");
  EXPECT_EQ(arguments->positional(1), "decay");
  EXPECT_TRUE(arguments->Has("json"));
  EXPECT_EQ(arguments->Number("lr").value(), -1e-3);
  EXPECT_EQ(arguments->Bool("maximize").value(), true);
  EXPECT_EQ(arguments->Get("nothing", "otherwise"), "otherwise");
}

TEST(Arguments, AbsentFlagsAreNotZero) {
  const auto arguments = Arguments::Parse(kSpec, std::vector<std::string>{"a", "b"});
  EXPECT_EQ(arguments->Number("lr").value(), std::nullopt);
  EXPECT_EQ(arguments->Bool("maximize").value(), std::nullopt);
}

TEST(Arguments, SaysWhatIsWrong) {
  EXPECT_EQ(Refusal({"a", "b", "--rl", "1"}), "unknown flag --rl");
  EXPECT_EQ(Refusal({"a", "b", "--lr"}), "--lr needs a value: NUMBER");
  EXPECT_EQ(Refusal({"a", "b", "--json=1"}), "--json has no value");
  EXPECT_EQ(Refusal({"a"}), "missing argument GROUP");
  EXPECT_EQ(Refusal({"a", "b", "c"}), "unexpected argument 'c'");
  const auto arguments =
      Arguments::Parse(kSpec, std::vector<std::string>{"a", "b", "--lr", "fast", "--maximize=2"});
  EXPECT_EQ(arguments->Number("lr").status().message(), "--lr is 'fast', expected a number");
  EXPECT_EQ(arguments->Bool("maximize").status().message(),
            "--maximize is '2', expected true or false");
}

TEST(HelpText, ShowsArgumentsAndFlags) {
  EXPECT_EQ(HelpText(kSpec),
            "usage: ballast set-group JOB GROUP [flags]\n\nchanges things\n\nflags:\n"
            "  --lr NUMBER      learning rate\n"
            "  --maximize BOOL  true or false\n"
            "  --json           print JSON\n");
}

}  // namespace
}  // namespace ballast::client::cli
