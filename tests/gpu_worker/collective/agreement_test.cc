#include "gpu_worker/collective/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu_worker/collective/single_collective.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

// What each of three ranks gets.
std::vector<absl::Status> Told(
    const std::function<std::vector<AgreedSetting>(int rank)>& settings_of) {
  std::vector<absl::Status> statuses(3);
  RunRanks(3, [&](Collective& collective) {
    statuses[collective.rank()] = CheckAgreement(settings_of(collective.rank()), collective);
  });
  return statuses;
}

void ExpectRefused(const std::function<std::vector<AgreedSetting>(int rank)>& settings_of) {
  for (const absl::Status& status : Told(settings_of)) {
    EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition));
  }
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
    ExpectRefused([&](int rank) -> std::vector<AgreedSetting> {
      return {{"--width", "64"}, {"--seed", rank == odd ? "2" : "1"}, {"--lr", "1"}};
    });
  }
}

TEST(Agreement, RankZeroMayBeTheOddOne) {
  ExpectRefused([](int rank) -> std::vector<AgreedSetting> {
    return {{"--seed", rank == 0 ? "2" : "1"}};
  });
}

TEST(Agreement, OfSeveralDifferencesTheFirstRanksFirstIsNamed) {
  ExpectRefused([](int rank) -> std::vector<AgreedSetting> {
    return {{"--width", rank == 2 ? "32" : "64"},
            {"--seed", rank == 1 ? "2" : "1"},
            {"--lr", rank == 1 ? "2" : "1"}};
  });
}

// Programs of different versions have different settings, and messages of one size all the same.
TEST(Agreement, ASettingThatOnlyOneRankHasIsADifference) {
  ExpectRefused([](int rank) -> std::vector<AgreedSetting> {
    std::vector<AgreedSetting> settings = {{"--width", "64"}};
    if (rank == 2) settings.push_back({"--depth", ""});
    return settings;
  });
}

TEST(Agreement, TheSameValueOfAnotherSettingIsADifference) {
  ExpectRefused([](int rank) -> std::vector<AgreedSetting> {
    return {{rank == 1 ? "--depth" : "--width", "64"}};
  });
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
