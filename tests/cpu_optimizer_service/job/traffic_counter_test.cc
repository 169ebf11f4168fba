#include "cpu_optimizer_service/job/core/traffic_counter.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

TEST(TrafficCounter, CountsEachWayApart) {
  TrafficCounter counter;
  counter.CountGradient(1, /*in_place=*/false);
  counter.CountGradient(20, /*in_place=*/true);
  counter.CountWeights(300, /*in_place=*/false);
  counter.CountWeights(4000, /*in_place=*/true);
  counter.CountWeights(4000, /*in_place=*/true);
  const JobTraffic total = counter.total();
  EXPECT_EQ(total.gradient_bytes_in_messages, 1);
  EXPECT_EQ(total.gradient_bytes_in_place, 20);
  EXPECT_EQ(total.weight_bytes_in_messages, 300);
  EXPECT_EQ(total.weight_bytes_in_place, 8000);
}

}  // namespace
}  // namespace ballast
