#include "gpu_worker/collective/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu_worker/collective/single_collective.h"
#include "tests/gpu_worker/collective/ranks.h"

namespace ballast::worker {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::StartsWith;

// What each of three ranks gets.
std::vector<absl::Status> Told(
    const std::function<std::vector<AgreedSetting>(int rank)>& settings_of) {
  std::vector<absl::Status> statuses(3);
  RunRanks(3, [&](Collective& collective) {
    statuses[collective.rank()] = CheckAgreement(settings_of(collective.rank()), collective);
  });
  return statuses;
}

std::vector<std::string> Refusals(
    const std::function<std::vector<AgreedSetting>(int rank)>& settings_of) {
  std::vector<std::string> messages;
  for (const absl::Status& status : Told(settings_of)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    messages.emplace_back(status.message());
  }
  return messages;
}

TEST(Agreement, IsOfRanksWhoseSettingsAreTheSame) {
  const std::string text(100000, 'x');
  for (const absl::Status& status : Told([&](int) -> std::vector<AgreedSetting> {
         return {{"--width", "64"}, {"--out", ""}, {"--text", text}};
       })) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(Agreement, WhoDiffersAndInWhatIsNamedOnEveryRank) {
  for (const int odd : {1, 2}) {
    EXPECT_THAT(Refusals([&](int rank) -> std::vector<AgreedSetting> {
                  return {{"--width", "64"}, {"--seed", rank == odd ? "2" : "1"}, {"--lr", "1"}};
                }),
                Each(StartsWith(absl::StrCat("rank ", odd,
                                             " and rank 0 were started differently: "
                                             "they differ in --seed;"))));
  }
}

TEST(Agreement, RankZeroMayBeTheOddOne) {
  EXPECT_THAT(Refusals([](int rank) -> std::vector<AgreedSetting> {
                return {{"--seed", rank == 0 ? "2" : "1"}};
              }),
              Each(HasSubstr("rank 1 and rank 0 were started differently: they differ in --seed")));
}

TEST(Agreement, OfSeveralDifferencesTheFirstRanksFirstIsNamed) {
  EXPECT_THAT(Refusals([](int rank) -> std::vector<AgreedSetting> {
                return {{"--width", rank == 2 ? "32" : "64"},
                        {"--seed", rank == 1 ? "2" : "1"},
                        {"--lr", rank == 1 ? "2" : "1"}};
              }),
              Each(HasSubstr("rank 1 and rank 0 were started differently: they differ in --seed")));
}

// Programs of different versions have different settings, and messages of one size all the same.
TEST(Agreement, ASettingThatOnlyOneRankHasIsADifference) {
  const std::vector<std::string> statuses = Refusals([](int rank) -> std::vector<AgreedSetting> {
    std::vector<AgreedSetting> settings = {{"--width", "64"}};
    if (rank == 2) settings.push_back({"--depth", ""});
    return settings;
  });
  EXPECT_THAT(statuses[0], StartsWith("rank 2 and rank 0 were started differently: they differ in "
                                      "their versions;"));
  EXPECT_EQ(statuses[1], statuses[0]);
  EXPECT_THAT(statuses[2], HasSubstr("they differ in --depth;"));
}

TEST(Agreement, TheSameValueOfAnotherSettingIsADifference) {
  EXPECT_THAT(Refusals([](int rank) -> std::vector<AgreedSetting> {
                return {{rank == 1 ? "--depth" : "--width", "64"}};
              })[0],
              HasSubstr("rank 1 and rank 0 were started differently: they differ in --width;"));
}

TEST(Agreement, AnErrorOfTheCollectiveIsPassedOn) {
  RunRanks(2, [](Collective& collective) {
    if (collective.rank() == 1) return;  // It ends before it has sent anything.
    const absl::Status status = CheckAgreement({{"--width", "64"}}, collective);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  });
}

TEST(AgreementDeathTest, MoreSettingsThanAMessageHoldsAbort) {
  SingleCollective collective;
  const std::vector<AgreedSetting> settings(kMaxAgreedSettings + 1, {"--width", "64"});
  EXPECT_DEATH(CheckAgreement(settings, collective).IgnoreError(), "the message has room for all");
}

}  // namespace
}  // namespace ballast::worker
