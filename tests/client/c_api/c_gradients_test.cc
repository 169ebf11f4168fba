// Gradients given one by one, as a backward pass comes to them: the same bits as given at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/ballast.h"
#include "tests/client/c_api/c_refused.h"
#include "tests/support/processes.h"
#include "tests/support/service_for_tests.h"
#include "tests/support/threads.h"

namespace ballast::client::c_gradients_test {
namespace {

constexpr int kParameters = 5;
// Longer than some chunks; within one; frozen; seldom used; in a chunk of its neighbours.
constexpr std::array<int64_t, kParameters> kElements = {900, 7, 5, 300, 40};
constexpr int kFrozen = 2;

float Value(uint64_t step, uint32_t micro_step, int parameter, int64_t element) {
  return 0.03f *
         static_cast<float>((step * 13 + micro_step * 7 + parameter * 17 + element * 5) % 89 - 44);
}

template <typename Call>
void UntilDone(const Call& call) {
  int32_t status = BALLAST_DEADLINE_EXCEEDED;
  while (status == BALLAST_DEADLINE_EXCEEDED) status = call();
  EXPECT_EQ(status, BALLAST_OK) << ballast_message();
}

class Rank {
 public:
  Rank(const std::string& job, const std::string& service, bool shares = true, int rank = 0,
       int world_size = 1, double wait_seconds = 20, std::vector<int64_t> elements = {})
      : elements_(std::move(elements)) {
    const bool small = elements_.empty();
    if (small) elements_.assign(kElements.begin(), kElements.end());
    const int count = static_cast<int>(elements_.size());
    for (const int64_t of_one : elements_) {
      weights_.emplace_back(of_one, 0.0f);
      gradients_.emplace_back(of_one);
    }
    std::vector<std::string> names;
    std::vector<ballast_parameter> parameters;
    std::vector<void*> places;
    for (int p = 0; p < count; ++p) names.push_back(absl::StrCat("p", p));
    for (int p = 0; p < count; ++p) {
      parameters.push_back({.size = sizeof(ballast_parameter),
                            .name = names[p].c_str(),
                            .shape = &elements_[p],
                            .dimensions = 1,
                            .frozen = small && p == kFrozen});
      places.push_back(weights_[p].data());
    }
    const ballast_group group = {.size = sizeof(group), .name = "all", .hyper_parameters = kHyper};
    const ballast_job described = {.size = sizeof(described),
                                   .name = job.c_str(),
                                   .groups = &group,
                                   .group_count = 1,
                                   .parameters = parameters.data(),
                                   .parameter_count = elements_.size(),
                                   .world_size = world_size,
                                   .chunk_elements = small ? 256 : 0,
                                   .unused_policy = BALLAST_UNUSED_SKIP};
    const ballast_options options = {.size = sizeof(options),
                                     .service = service.c_str(),
                                     .job = &described,
                                     .rank = rank,
                                     .never_share_memory = !shares,
                                     .wait_seconds = wait_seconds,
                                     .weights = places.data()};
    EXPECT_EQ(ballast_open(&options, &session_), BALLAST_OK) << ballast_message();
    std::vector<const float*> first;
    for (int p = 0; p < count; ++p) {
      for (int64_t i = 0; i < elements_[p]; ++i) weights_[p][i] = 0.1f * Value(9, 9, p, i);
      first.push_back(weights_[p].data());
    }
    EXPECT_EQ(ballast_upload_weights(session_, first.data(), first.size()), BALLAST_OK)
        << ballast_message();
    EXPECT_EQ(ballast_read_weights(session_), BALLAST_OK) << ballast_message();
  }
  ~Rank() { ballast_close(session_); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  ballast_session* session() { return session_; }
  const std::vector<std::vector<float>>& weights() const { return weights_; }

  void Begin() {
    const ballast_step step = {.size = sizeof(step)};
    ASSERT_EQ(ballast_begin_step(session_, &step), BALLAST_OK) << ballast_message();
  }
  const void* Gradient(uint64_t step, uint32_t micro_step, int parameter) {
    for (int64_t i = 0; i < elements_[parameter]; ++i) {
      gradients_[parameter][i] = Value(step, micro_step, parameter, i);
    }
    return gradients_[parameter].data();
  }
  // However long it takes: a test's wait_seconds may be short.
  void Decide(uint32_t micro_steps) {
    ballast_decision decision = {.size = sizeof(decision)};
    UntilDone([&] { return ballast_seal_and_vote(session_, micro_steps, nullptr, &decision); });
    ASSERT_TRUE(decision.applied) << ballast_message();
    UntilDone([&] { return ballast_receive_weights(session_); });
  }
  // The reference: the gradients of `given` at once.
  void StepAtOnce(uint64_t step, const std::vector<std::vector<int>>& given) {
    Begin();
    for (uint32_t m = 0; m < given.size(); ++m) {
      std::array<const void*, kParameters> pointers = {};
      for (const int p : given[m]) pointers[p] = Gradient(step, m, p);
      ASSERT_EQ(ballast_push_gradients(session_, m, pointers.data(), kParameters, 0), BALLAST_OK)
          << ballast_message();
    }
    Decide(given.size());
  }

 private:
  static constexpr ballast_hyper_parameters kHyper = {.lr = 0.01,
                                                      .beta1 = 0.9,
                                                      .beta2 = 0.95,
                                                      .eps = 1e-8,
                                                      .weight_decay = 0.1,
                                                      .decoupled_weight_decay = 1,
                                                      .bias_correction = 1};
  std::vector<int64_t> elements_;
  std::vector<std::vector<float>> weights_, gradients_;
  ballast_session* session_ = nullptr;
};

void ExpectSameBits(const Rank& one, const Rank& other) {
  for (size_t p = 0; p < one.weights().size(); ++p) {
    EXPECT_EQ(std::memcmp(one.weights()[p].data(), other.weights()[p].data(),
                          one.weights()[p].size() * sizeof(float)),
              0)
        << "parameter " << p;
  }
}

// By micro-step, in the order in which they come.
const std::vector<std::vector<std::vector<int>>> kSteps = {
    {{4, 3, 1, 0}}, {{1, 0, 4}, {0, 3, 4, 1}, {4}}, {{0}}, {{3, 4, 0, 1}, {}}};

class CGradients : public testing::Test {
 protected:
  std::string service() { return service_.server().addresses()[0]; }
  ServiceForTests service_;
};

TEST_F(CGradients, OneByOneInAnyOrderGiveTheBitsOfAllAtOnce) {
  for (const bool shares : {true, false}) {
    Rank one_by_one(absl::StrCat("one", shares), service(), shares);
    Rank at_once(absl::StrCat("once", shares), service(), shares);
    for (uint64_t step = 0; step < kSteps.size(); ++step) {
      one_by_one.Begin();
      for (uint32_t m = 0; m < kSteps[step].size(); ++m) {
        for (const int p : kSteps[step][m]) {
          ASSERT_EQ(
              ballast_give_gradient(one_by_one.session(), m, p, one_by_one.Gradient(step, m, p), 0),
              BALLAST_OK)
              << ballast_message();
        }
        ASSERT_EQ(ballast_end_gradients(one_by_one.session(), m, 0), BALLAST_OK)
            << ballast_message();
      }
      one_by_one.Decide(kSteps[step].size());
      at_once.StepAtOnce(step, kSteps[step]);
      ExpectSameBits(one_by_one, at_once);
    }
  }
}

// As a GPU's stream does it: written to their places, and told from another thread, in its own time.
TEST_F(CGradients, WrittenToTheirPlacesByAnotherThreadGiveTheSameBits) {
  for (const bool shares : {true, false}) {
    Rank copied(absl::StrCat("copied", shares), service(), shares);
    Rank at_once(absl::StrCat("at_once", shares), service(), shares);
    for (uint64_t step = 0; step < kSteps.size(); ++step) {
      copied.Begin();
      for (uint32_t m = 0; m < kSteps[step].size(); ++m) {
        struct Copy {
          std::vector<ballast_gradient_place> places;
          const float* gradient = nullptr;
          ballast_gradient_ticket ticket = {};
        };
        std::vector<Copy> copies;
        for (const int p : kSteps[step][m]) {
          Copy copy = {
              .places = std::vector<ballast_gradient_place>(8),
              .gradient = static_cast<const float*>(copied.Gradient(step, m, p)),
              .ticket = {.session = copied.session(), .parameter = static_cast<size_t>(p)}};
          size_t count = 0;
          ASSERT_EQ(ballast_gradient_places(copied.session(), m, p, copy.places.data(), 8, &count,
                                            &copy.ticket.attempt),
                    BALLAST_OK)
              << ballast_message();
          ASSERT_LE(count, 8);
          copy.places.resize(count);
          copies.push_back(std::move(copy));
        }
        std::atomic<bool> ending = false;
        std::thread stream([&] {
          while (!ending) std::this_thread::yield();  // The end of the micro-step waits for these.
          for (Copy& copy : copies) {
            for (const ballast_gradient_place& place : copy.places) {
              std::memcpy(place.data, copy.gradient + place.offset, place.elements * sizeof(float));
            }
            ballast_gradient_written(&copy.ticket);
          }
        });
        ending = true;
        EXPECT_EQ(ballast_end_gradients(copied.session(), m, 0), BALLAST_OK) << ballast_message();
        stream.join();
      }
      copied.Decide(kSteps[step].size());
      at_once.StepAtOnce(step, kSteps[step]);
      ExpectSameBits(copied, at_once);
    }
  }
}

TEST_F(CGradients, ATicketOfAnEarlierAttemptDoesNothing) {
  Rank rank("tickets", service(), true, 0, 1, /*wait_seconds=*/0.1);
  Rank at_once("no_tickets", service());
  rank.Begin();
  std::array<ballast_gradient_place, 8> places;
  size_t count = 0;
  ballast_gradient_ticket old = {.session = rank.session(), .parameter = 0};
  ASSERT_EQ(ballast_gradient_places(rank.session(), 0, 0, places.data(), 8, &count, &old.attempt),
            BALLAST_OK);
  ASSERT_EQ(ballast_give_gradient(rank.session(), 0, 0, rank.Gradient(0, 0, 0), 0), BALLAST_OK);
  ASSERT_EQ(ballast_end_gradients(rank.session(), 0, 0), BALLAST_OK);
  rank.Decide(1);
  at_once.StepAtOnce(0, {{0}});

  rank.Begin();
  ballast_gradient_ticket now = {.session = rank.session(), .parameter = 0};
  ASSERT_EQ(ballast_gradient_places(rank.session(), 0, 0, places.data(), 8, &count, &now.attempt),
            BALLAST_OK);
  EXPECT_NE(now.attempt, old.attempt);
  ballast_gradient_written(&old);
  EXPECT_TRUE(Refused(ballast_end_gradients(rank.session(), 0, 0), BALLAST_DEADLINE_EXCEEDED));
  const auto* gradient = static_cast<const float*>(rank.Gradient(1, 0, 0));
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(places[i].data, gradient + places[i].offset, places[i].elements * sizeof(float));
  }
  ballast_gradient_written(&now);
  UntilDone([&] { return ballast_end_gradients(rank.session(), 0, 0); });
  rank.Decide(1);
  at_once.StepAtOnce(1, {{0}});
  ExpectSameBits(rank, at_once);
}

TEST_F(CGradients, CallsOutOfTurnAreRefusedAndChangeNothing) {
  Rank rank("turns", service());
  Rank at_once("turns_at_once", service());
  rank.Begin();
  const auto give = [&](uint32_t micro_step, int parameter) {
    return ballast_give_gradient(rank.session(), micro_step, parameter,
                                 rank.Gradient(0, 0, parameter), 0);
  };
  ASSERT_EQ(give(0, 1), BALLAST_OK) << ballast_message();
  EXPECT_TRUE(Refused(give(0, 1), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(Refused(give(1, 0), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(Refused(give(0, kFrozen), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(
      Refused(ballast_give_gradient(rank.session(), 0, 99, nullptr, 0), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(
      Refused(ballast_give_gradient(rank.session(), 0, 0, nullptr, 0), BALLAST_INVALID_ARGUMENT));
  ASSERT_EQ(ballast_end_gradients(rank.session(), 0, 0), BALLAST_OK) << ballast_message();
  rank.Decide(1);
  at_once.StepAtOnce(0, {{1}});
  ExpectSameBits(rank, at_once);
}

// Chunks have left when a service that takes no more makes the end time out: which parameters have
// a gradient is decided, and a call that says something else is refused.
TEST(CGradientsHalfGiven, GoOnWithTheSameCallOnly) {
  const std::vector<int64_t> elements = {100, 100, 12'000'000, 12'000'000, 100};
  Ballastd ballastd(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--holder=none"});
  const std::string service = ballastd.Address();
  ASSERT_NE(service, "") << ballastd.Errors();
  Rank rank("half", service, /*shares=*/false, 0, 1, /*wait_seconds=*/5, elements);
  Rank at_once("whole", service, /*shares=*/false, 0, 1, /*wait_seconds=*/60, elements);
  rank.Begin();
  std::array<const void*, kParameters> gradients = {};
  for (const int p : {0, 2, 3}) gradients[p] = rank.Gradient(0, 0, p);
  const void* const late = rank.Gradient(0, 0, 1);
  const auto push = [&] {
    return ballast_push_gradients(rank.session(), 0, gradients.data(), kParameters, 0);
  };
  ballastd.Signal(SIGSTOP);
  ASSERT_EQ(push(), BALLAST_DEADLINE_EXCEEDED);
  gradients[1] = late;
  EXPECT_TRUE(Refused(push(), BALLAST_INVALID_ARGUMENT));
  gradients[1] = nullptr;
  std::swap(gradients[0], gradients[4]);
  EXPECT_TRUE(Refused(push(), BALLAST_INVALID_ARGUMENT));
  std::swap(gradients[0], gradients[4]);
  EXPECT_TRUE(Refused(ballast_end_gradients(rank.session(), 0, 0), BALLAST_INVALID_ARGUMENT));
  EXPECT_TRUE(
      Refused(ballast_give_gradient(rank.session(), 0, 1, late, 0), BALLAST_INVALID_ARGUMENT));
  std::array<ballast_gradient_place, 8> places;
  size_t count = 0;
  uint64_t attempt = 0;
  EXPECT_TRUE(
      Refused(ballast_gradient_places(rank.session(), 0, 1, places.data(), 8, &count, &attempt),
              BALLAST_INVALID_ARGUMENT));
  ballastd.Signal(SIGCONT);
  UntilDone(push);
  rank.Decide(1);
  at_once.StepAtOnce(0, {{0, 2, 3}});
  ExpectSameBits(rank, at_once);
}

// A call on a thread of its own, which waits, or has ended, when this is constructed.
class WaitingCall {
 public:
  explicit WaitingCall(std::function<int32_t()> call)
      : thread_([this, call = std::move(call)] {
          thread_id_ = gettid();
          status_ = call();
          ended_ = true;
        }) {
    while (!ended_ && !ThreadSleeps(thread_id_)) std::this_thread::yield();
  }
  ~WaitingCall() {
    if (thread_.joinable()) thread_.join();
  }
  int32_t Result() {
    thread_.join();
    return status_;
  }

 private:
  std::atomic<pid_t> thread_id_ = 0;
  std::atomic<bool> ended_ = false;
  int32_t status_ = 0;
  std::thread thread_;
};

// An end that did not see them would wait for an hour.
TEST_F(CGradients, AnEndSeesWhatAnotherThreadGivesOrDiscardsMeanwhile) {
  Rank rank("meanwhile", service(), true, 0, 1, /*wait_seconds=*/3600);
  const auto end = [&] { return ballast_end_gradients(rank.session(), 0, 0); };
  const auto take_places = [&] {
    size_t count = 0;
    uint64_t attempt = 0;
    ASSERT_EQ(ballast_gradient_places(rank.session(), 0, 0, nullptr, 0, &count, &attempt),
              BALLAST_OK)
        << ballast_message();
  };
  rank.Begin();
  take_places();
  WaitingCall discarded(end);
  ASSERT_EQ(ballast_discard(rank.session()), BALLAST_OK) << ballast_message();
  EXPECT_EQ(discarded.Result(), BALLAST_FAILED_PRECONDITION);
  rank.Begin();
  take_places();
  WaitingCall ended(end);
  ASSERT_EQ(ballast_give_gradient(rank.session(), 0, 0, nullptr, 0), BALLAST_OK)
      << ballast_message();
  EXPECT_EQ(ended.Result(), BALLAST_OK);
  rank.Decide(1);
}

constexpr int64_t kMoreThanTheWindow = 24'000'000;

// A step of the rank, with places for the gradient of its first parameter.
void BeginPlaces(Rank& rank, ballast_gradient_ticket& ticket) {
  rank.Begin();
  ticket = {.session = rank.session(), .parameter = 0};
  size_t count = 0;
  ASSERT_EQ(ballast_gradient_places(rank.session(), 0, 0, nullptr, 0, &count, &ticket.attempt),
            BALLAST_OK)
      << ballast_message();
}

// While one thread waits for a service that takes nothing, and another for the first one's lock: a
// callback of CUDA must not wait for them.
TEST(CGradientsWritten, AreToldWithoutAWait) {
  Ballastd ballastd(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--holder=none"});
  const std::string service = ballastd.Address();
  ASSERT_NE(service, "") << ballastd.Errors();
  Rank rank("written", service, /*shares=*/false, 0, 1, /*wait_seconds=*/3600,
            {1000, kMoreThanTheWindow});
  ballast_gradient_ticket ticket = {};
  BeginPlaces(rank, ticket);
  ASSERT_FALSE(HasFatalFailure());
  const void* const large = rank.Gradient(0, 0, 1);
  ballastd.Signal(SIGSTOP);
  WaitingCall give([&] { return ballast_give_gradient(rank.session(), 0, 1, large, 0); });
  WaitingCall end([&] { return ballast_end_gradients(rank.session(), 0, 0); });
  ballast_gradient_written(&ticket);
  ballastd.Signal(SIGCONT);
  EXPECT_EQ(give.Result(), BALLAST_OK);
  EXPECT_EQ(end.Result(), BALLAST_OK);
  rank.Decide(1);
}

// The thread behind ballast_gradient_written waits for a service that is silent, and longer than
// this test may take.
TEST(CGradientsWritten, AreNotWaitedForByAClose) {
  Ballastd ballastd(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--holder=none"});
  const std::string service = ballastd.Address();
  ASSERT_NE(service, "") << ballastd.Errors();
  Rank rank("close", service, /*shares=*/false, 0, 1, /*wait_seconds=*/3600, {kMoreThanTheWindow});
  ballast_gradient_ticket ticket = {};
  BeginPlaces(rank, ticket);
  ASSERT_FALSE(HasFatalFailure());
  ballastd.Signal(SIGSTOP);
  ballast_gradient_written(&ticket);
  // Nothing shows that it waits. Were this too short, the test would find less, and not fail.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
}  // Closes the session.

// Megabytes, which are copied by several threads: whole parameters at once or one by one; and what
// comes back against what the service says.
TEST_F(CGradients, LargeOnesGiveTheSameBitsHoweverTheyAreCopied) {
  const std::vector<int64_t> elements = {700'001, 7, 300'003, 100'005};
  for (const bool shares : {true, false}) {
    const auto rank = [&](const char* job) {
      return std::make_unique<Rank>(absl::StrCat(job, shares), service(), shares, 0, 1, 60,
                                    elements);
    };
    const auto at_once = rank("large_once"), one_by_one = rank("large_one");
    for (uint64_t step = 0; step < 2; ++step) {
      std::vector<std::vector<float>> gradients;
      std::vector<const void*> pointers;
      for (size_t p = 0; p < elements.size(); ++p) {
        const auto* gradient = static_cast<const float*>(at_once->Gradient(step, 0, p));
        gradients.emplace_back(gradient, gradient + elements[p]);
        pointers.push_back(gradients.back().data());
      }
      at_once->Begin();
      ASSERT_EQ(ballast_push_gradients(at_once->session(), 0, pointers.data(), 4, BALLAST_FINAL),
                BALLAST_OK)
          << ballast_message();
      at_once->Decide(1);
      one_by_one->Begin();
      for (const int p : {2, 1, 0, 3}) {
        ASSERT_EQ(ballast_give_gradient(one_by_one->session(), 0, p, pointers[p], BALLAST_FINAL),
                  BALLAST_OK)
            << ballast_message();
      }
      ASSERT_EQ(ballast_end_gradients(one_by_one->session(), 0, BALLAST_FINAL), BALLAST_OK);
      one_by_one->Decide(1);
      for (size_t p = 0; p < elements.size(); ++p) {
        std::vector<float> master(elements[p]);
        uint64_t of_step = 0;
        int64_t updates = 0;
        const std::string name = absl::StrCat("jobs/large_once", shares, "/parameters/p", p);
        const std::string address = service();
        const ballast_options options = {.size = sizeof(options), .service = address.c_str()};
        ASSERT_EQ(ballast_read_state(&options, name.c_str(), BALLAST_MASTER, master.data(),
                                     elements[p], &of_step, &updates),
                  BALLAST_OK)
            << ballast_message();
        // Not by EXPECT_EQ, which would print millions.
        EXPECT_TRUE(at_once->weights()[p] == master) << "parameter " << p;
      }
      ExpectSameBits(*one_by_one, *at_once);
    }
  }
}

}  // namespace
}  // namespace ballast::client::c_gradients_test
