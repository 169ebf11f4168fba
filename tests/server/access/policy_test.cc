#include "server/access/policy.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/support/messages.h"

namespace ballast::server {
namespace {

// The SHA-256 of "abc", from FIPS 180-2.
constexpr char kAbc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

// And of nothing.
constexpr char kEmpty[] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

absl::StatusOr<Policy> PolicyOf(absl::string_view roles, absl::string_view tokens = "") {
  return Policy::Parse(roles, "roles", tokens, "tokens");
}

TEST(Policy, TheHighestRoleOfTheLinesThatFitCounts) {
  const Policy policy = PolicyOf(
                            "operator gpt-*-big cert:Alice of the lab\n"
                            "viewer * *\n"
                            "trainer gpt-* cert:Alice of the lab")
                            .value();
  EXPECT_EQ(policy.RoleOf("cert:Alice of the lab", "gpt-2-big"), Role::kOperator);
  EXPECT_EQ(policy.RoleOf("cert:Alice of the lab", "gpt-2"), Role::kTrainer);
  EXPECT_EQ(policy.RoleOf("cert:Alice of the lab", "bert"), Role::kViewer);
  EXPECT_EQ(policy.RoleOf("cert:Alice", "gpt-2"), Role::kViewer);
  EXPECT_EQ(policy.RoleOf("", "gpt-2"), Role::kNobody);
  EXPECT_EQ(policy.HighestRoleOf("cert:Alice of the lab"), Role::kOperator);
  EXPECT_EQ(policy.HighestRoleOf(""), Role::kNobody);
}

TEST(Policy, ARoleForAllJobsIsThatOfLinesForAll) {
  const Policy policy = PolicyOf("operator gpt-* cert:a\nviewer * *\noperator * token:b").value();
  EXPECT_EQ(policy.RoleOfAll("cert:a"), Role::kViewer);
  EXPECT_EQ(policy.RoleOfAll("token:b"), Role::kOperator);
  EXPECT_EQ(policy.RoleOfAll(""), Role::kNobody);
}

TEST(Policy, NobodyIsEverybodyWhereTheFileDoesNotSaySo) {
  const Policy policy = PolicyOf("# Nobody yet.\n").value();
  EXPECT_EQ(policy.RoleOf("user:0", "a"), Role::kNobody);
  EXPECT_EQ(policy.HighestRoleOf("user:0"), Role::kNobody);
}

TEST(Policy, UsersHaveNamesAndNumbers) {
  const Policy policy = PolicyOf("viewer * user:root\ntrainer * user:77").value();
  EXPECT_EQ(policy.RoleOf(UserPrincipal(0), "a"), Role::kViewer);
  EXPECT_EQ(policy.RoleOf(UserPrincipal(77), "a"), Role::kTrainer);
  EXPECT_TRUE(policy.Names(UserPrincipal(77)));
  EXPECT_FALSE(policy.Names(UserPrincipal(78)));
}

TEST(Policy, KnowsTokensByTheirDigests) {
  const Policy policy =
      PolicyOf("", absl::StrCat("ci ", kAbc, "\nold ", std::string(64, '0'))).value();
  EXPECT_EQ(policy.TokenWith(DigestOf("abc")), "ci");
  EXPECT_EQ(policy.TokenWith(DigestOf("abd")), std::nullopt);
  EXPECT_EQ(policy.TokenWith(DigestOf("")), std::nullopt);
}

TEST(Policy, KnowsWhichTokensAreMissing) {
  const Policy policy =
      PolicyOf("viewer * token:ci\nviewer * token:old\nviewer * cert:new\noperator * *",
               absl::StrCat("ci ", kAbc))
          .value();
  EXPECT_THAT(policy.MissingTokens(), testing::ElementsAre("old"));
}

TEST(Policy, SaysInOneLineWhichLineIsWrong) {
  const auto error = [](absl::string_view roles, absl::string_view tokens = "") {
    return PolicyOf(roles, tokens).status();
  };
  EXPECT_TRUE(Refused(error("viewer * *\nadmin * *"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(error("nobody * *"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(error("4f6ca0e1d0c5"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(error("viewer gpt[0-9] *"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(error("viewer *"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(error("viewer * cert:"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(error("viewer * alice"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(error("viewer * user:no-such-user"), absl::StatusCode::kInvalidArgument));
  // Without the token, wherever in the line it stands: alone, as in a client's file, too.
  for (const char* line :
       {"ci my-secret-token", "my-secret-token", "my-secret-token ci", "Bearer my-secret-token"}) {
    EXPECT_TRUE(Refused(error("", line), absl::StatusCode::kInvalidArgument));
  }
  // What the recipe makes of a variable that is not set would let in every header without a token.
  EXPECT_TRUE(Refused(error("", absl::StrCat("ci ", kEmpty)), absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace ballast::server
