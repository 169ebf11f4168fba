#include "server/shared_memory/shared_memory_offers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cpu_optimizer_service/engine.h"

namespace ballast::server {
namespace {

using std::chrono::seconds;

class SharedMemoryOffersTest : public testing::Test {
 protected:
  static JobSpec OneRank(const std::string& name) {
    JobSpec spec;
    spec.name = name;
    spec.groups = {{.name = "g", .hyper_parameters = {}}};
    spec.layout.parameters = {{.name = "w", .shape = {256}}};
    spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 256}};
    return spec;
  }

  Engine engine_{{.memory_limit_bytes = 64 << 20, .threads = 1}};
  std::shared_ptr<Job> job_ = engine_.CreateJob(OneRank("one")).value();
  SharedMemoryOffers offers_{2, seconds(10)};
  const SharedMemoryOffers::Clock::time_point now_{};
};

TEST_F(SharedMemoryOffersTest, AreTakenOnceAndKnowTheirHolder) {
  const std::string token =
      offers_.Add(job_, {.rank = 3, .process_id = "p", .generation = 7}, now_).value();
  EXPECT_EQ(token.size(), proto::kSharedMemoryTokenBytes);
  EXPECT_FALSE(offers_.Take(std::string(token.size(), '\0'), now_).has_value());
  for (size_t i = 0; i < token.size(); ++i) {
    std::string near = token;
    near[i] ^= 1;
    EXPECT_FALSE(offers_.Take(near, now_).has_value()) << i;
  }
  EXPECT_FALSE(offers_.Take(token.substr(1), now_).has_value());
  EXPECT_FALSE(offers_.Take("", now_).has_value());
  const auto claim = offers_.Take(token, now_);
  ASSERT_TRUE(claim.has_value());
  EXPECT_EQ(claim->job.lock(), job_);
  EXPECT_EQ(claim->holder.rank, 3);
  EXPECT_EQ(claim->holder.process_id, "p");
  EXPECT_EQ(claim->holder.generation, Generation(7));
  EXPECT_FALSE(offers_.Take(token, now_).has_value());
}

TEST_F(SharedMemoryOffersTest, AreReplacedByLaterHoldersOnly) {
  const std::string first = offers_.Add(job_, {.rank = 0, .generation = 2}, now_).value();
  EXPECT_EQ(offers_.Add(job_, {.rank = 0, .generation = 1}, now_), std::nullopt);
  const std::string second = offers_.Add(job_, {.rank = 0, .generation = 2}, now_).value();
  EXPECT_NE(first, second);
  EXPECT_FALSE(offers_.Take(first, now_).has_value());
  EXPECT_TRUE(offers_.Take(second, now_).has_value());
}

TEST_F(SharedMemoryOffersTest, MakeRoomForLaterOnesWhereThereAreTooMany) {
  SharedMemoryOffers offers(2, seconds(10));
  const std::string second = offers.Add(job_, {.rank = 0}, now_ + seconds(1)).value();
  const std::string first = offers.Add(job_, {.rank = 1}, now_).value();
  // In place of the rank's last one, so that none has to go.
  const std::string again = offers.Add(job_, {.rank = 0}, now_ + seconds(2)).value();
  const std::string third = offers.Add(job_, {.rank = 2}, now_ + seconds(3)).value();
  EXPECT_FALSE(offers.Take(first, now_ + seconds(3)).has_value());
  EXPECT_FALSE(offers.Take(second, now_ + seconds(3)).has_value());
  EXPECT_TRUE(offers.Take(again, now_ + seconds(3)).has_value());
  EXPECT_TRUE(offers.Take(third, now_ + seconds(3)).has_value());
}

TEST_F(SharedMemoryOffersTest, AreForgottenInTimeAndWithTheirJob) {
  std::shared_ptr<Job> other = engine_.CreateJob(OneRank("other")).value();
  const std::string token = offers_.Add(job_, {.rank = 0}, now_).value();
  const std::string others = offers_.Add(other, {.rank = 0}, now_ + seconds(5)).value();
  EXPECT_FALSE(offers_.Take(token, now_ + seconds(10)).has_value());
  const std::string later = offers_.Add(job_, {.rank = 1}, now_ + seconds(10)).value();
  ASSERT_TRUE(engine_.CloseJob("other").ok());
  other = nullptr;
  EXPECT_FALSE(offers_.Take(others, now_ + seconds(11)).has_value());
  EXPECT_TRUE(offers_.Take(later, now_ + seconds(11)).has_value());
}

}  // namespace
}  // namespace ballast::server
