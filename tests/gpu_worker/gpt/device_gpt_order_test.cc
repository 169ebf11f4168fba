// What comes before and after what: events, other streams, passes one after another, and what is
// done where the device fails. The tests' own device alone can be late, odd and broken.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/reason.h"
#include "tests/gpu_emulator/fake_device.h"
#include "tests/gpu_worker/gpt/model_on_device.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

constexpr GptConfig kConfig{.layers = 2, .heads = 1, .width = 64, .context = 16};
constexpr int kSequences = 2;

class OrderTest : public testing::TestWithParam<uint64_t> {
 protected:
  OrderTest()
      : device_({.seed = GetParam(),
                 .memory_bytes = int64_t{1} << 32,
                 .can_pin = true,
                 .fail =
                     [this](absl::string_view operation, absl::string_view what) {
                       return fail_ == nullptr ? absl::OkStatus() : fail_(operation, what);
                     }}),
        compute_(device_.CreateStream("compute").value()),
        copies_(device_.CreateStream("copies").value()),
        matmul_(MakeFakeMatmul()),
        gpt_(kConfig, {device_, *compute_, *matmul_}, kSequences) {}

  // What `from` was given comes before what `to` is given from now on.
  absl::Status Order(DeviceStream& from, DeviceStream& to) {
    events_.push_back(device_.CreateEvent().value());
    const absl::Status recorded = from.Record(*events_.back());
    return recorded.ok() ? to.Wait(*events_.back()) : recorded;
  }
  absl::Status Pass(const Batch& batch, const DevicePassEvents& events) {
    return gpt_.model().ForwardBackward(batch, {}, gpt_.loss(), events);
  }
  // The memory of `values`, pinned from now on: copies of it are done late.
  template <typename T>
  absl::Span<std::byte> Pinned(std::vector<T>& values) {
    pinned_.push_back(
        device_
            .PinHost({reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)},
                     "values")
            .value());
    return pinned_.back()->bytes();
  }
  // Before `values` go.
  void Unpin() {
    ExpectOk(copies_->Synchronize());
    ExpectOk(compute_->Synchronize());
    pinned_.clear();
  }

  std::function<absl::Status(absl::string_view, absl::string_view)> fail_;
  FakeDevice device_;
  std::vector<std::unique_ptr<DeviceEvent>> events_;
  std::vector<std::unique_ptr<HostMemory>> pinned_;
  const std::unique_ptr<DeviceStream> compute_;
  const std::unique_ptr<DeviceStream> copies_;
  const std::unique_ptr<DeviceMatmul> matmul_;
  ModelOnDevice gpt_;
};

using DeviceGptOrder = OrderTest;
INSTANTIATE_TEST_SUITE_P(Seeds, DeviceGptOrder, testing::Range<uint64_t>(0, 6));

TEST_P(DeviceGptOrder, EventsComeOnceAndInOrder) {
  std::vector<int> read, written, ready;
  ExpectOk(Pass(SomeBatch(kConfig, 2, 16), {.before_weights =
                                                [&](int p) {
                                                  read.push_back(p);
                                                  return absl::OkStatus();
                                                },
                                            .before_gradient =
                                                [&](int p) {
                                                  written.push_back(p);
                                                  return absl::OkStatus();
                                                },
                                            .gradient_ready =
                                                [&](int p) {
                                                  EXPECT_THAT(written, testing::Contains(p));
                                                  ready.push_back(p);
                                                  return absl::OkStatus();
                                                }}));
  std::vector<int> all(gpt_.parameters());
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(read, all);  // Parameters are numbered in the order of the layers.
  EXPECT_EQ(ready, GptBackwardOrder(kConfig));
  EXPECT_EQ(written.front(), kTokenEmbedding);  // The head.
  EXPECT_THAT(written, testing::UnorderedElementsAreArray(all));
}

// Weights arrive only once the pass announces that it is about to read them.
TEST_P(DeviceGptOrder, ReadsNoWeightsBeforeItSaysSo) {
  const Batch batch = SomeBatch(kConfig, 2, 16);
  const PassResult expected = gpt_.Pass(batch);
  gpt_.PoisonWeights();
  std::vector<std::vector<uint16_t>> weights;
  for (int p = 0; p < gpt_.parameters(); ++p) weights.push_back(SomeWeights(kConfig, p));
  ExpectOk(Pass(batch, {.before_weights = [&](int p) {
                  const absl::Status copied =
                      copies_->CopyToDevice(gpt_.WeightsAt(p), Pinned(weights[p]));
                  return copied.ok() ? Order(*copies_, *compute_) : copied;
                }}));
  Unpin();
  EXPECT_TRUE(gpt_.Result() == expected);
}

// What was there is taken away, and the new gradient too, each while the pass goes on.
TEST_P(DeviceGptOrder, WritesAGradientBetweenItsTwoEventsAlone) {
  const PassResult before = gpt_.Pass(SomeBatch(kConfig, 2, 16, 1));
  const Batch batch = SomeBatch(kConfig, 2, 16, 2);
  std::vector<std::vector<float>> old, complete;
  for (int p = 0; p < gpt_.parameters(); ++p) {
    old.emplace_back(gpt_.Elements(p));
    complete.emplace_back(gpt_.Elements(p));
  }
  ExpectOk(Pass(batch, {.before_gradient =
                            [&](int p) {
                              absl::Status status =
                                  copies_->CopyToHost(Pinned(old[p]), gpt_.GradientAt(p));
                              return status.ok() ? Order(*copies_, *compute_) : status;
                            },
                        .gradient_ready =
                            [&](int p) {
                              absl::Status status = Order(*compute_, *copies_);
                              return status.ok() ? copies_->CopyToHost(Pinned(complete[p]),
                                                                       gpt_.GradientAt(p))
                                                 : status;
                            }}));
  Unpin();
  const PassResult after = gpt_.Result();
  for (int p = 0; p < gpt_.parameters(); ++p) {
    EXPECT_EQ(old[p], before.gradients[p]) << GptParameters(kConfig)[p].name;
    EXPECT_EQ(complete[p], after.gradients[p]) << GptParameters(kConfig)[p].name;
    EXPECT_NE(old[p], complete[p]) << GptParameters(kConfig)[p].name;
  }
}

// Passes are given while earlier ones are still to be done, and their batches are gone by then.
TEST_P(DeviceGptOrder, APassHasItsOwnTokensHoweverLateItIsDone) {
  constexpr int kPasses = 5;
  std::vector<PassResult> expected;
  for (int i = 0; i < kPasses; ++i) {
    expected.push_back(gpt_.Pass(SomeBatch(kConfig, 1 + i % 2, 16 - i, i)));
  }
  std::vector<std::vector<double>> losses(kPasses, std::vector<double>(1));
  std::vector<std::vector<float>> embeddings;
  for (int i = 0; i < kPasses; ++i) embeddings.emplace_back(gpt_.Elements(kTokenEmbedding));
  for (int i = 0; i < kPasses; ++i) {
    ExpectOk(Pass(SomeBatch(kConfig, 1 + i % 2, 16 - i, i), {}));
    ExpectOk(compute_->CopyToHost(Pinned(losses[i]), gpt_.loss()));
    ExpectOk(compute_->CopyToHost(Pinned(embeddings[i]), gpt_.GradientAt(kTokenEmbedding)));
  }
  Unpin();
  for (int i = 0; i < kPasses; ++i) {
    EXPECT_EQ(losses[i][0], expected[i].loss) << i;
    EXPECT_EQ(embeddings[i], expected[i].gradients[kTokenEmbedding]) << i;
  }
}

TEST_P(DeviceGptOrder, MayBeDestroyedWhileItsPassIsStillToBeDone) {
  ExpectOk(Pass(SomeBatch(kConfig, 2, 16), {}));
}

TEST_P(DeviceGptOrder, AnEventsErrorEndsThePass) {
  int ready = 0;
  const absl::Status status =
      Pass(SomeBatch(kConfig, 2, 16), {.gradient_ready = [&](int) {
             return ++ready == 3 ? absl::AbortedError("enough") : absl::OkStatus();
           }});
  EXPECT_EQ(status, absl::AbortedError("enough"));
  EXPECT_EQ(ready, 3);
  // The next pass is as if that one had not been.
  const Batch batch = SomeBatch(kConfig, 2, 16, 4);
  const PassResult result = gpt_.Pass(batch);
  EXPECT_TRUE(result == gpt_.Pass(batch));
}

TEST_P(DeviceGptOrder, HasTheSameBitsInEveryOrder) {
  const Batch batch = SomeBatch(kConfig, 2, 16);
  FakeDevice other({.seed = 100});
  const std::unique_ptr<DeviceStream> stream = other.CreateStream("compute").value();
  ModelOnDevice gpt(kConfig, {other, *stream, *matmul_}, kSequences);
  EXPECT_TRUE(gpt_.Pass(batch) == gpt.Pass(batch));
}

TEST(DeviceGptMemory, SaysWhatToMakeSmallerWhereThereIsTooLittle) {
  FakeDevice device({.memory_bytes = 1 << 20});
  const std::unique_ptr<DeviceStream> compute = device.CreateStream("compute").value();
  const std::unique_ptr<DeviceMatmul> matmul = MakeFakeMatmul();
  const absl::Status full = DeviceGpt::Create(kConfig, {device, *compute, *matmul}, 64).status();
  EXPECT_TRUE(Refused(full, absl::StatusCode::kResourceExhausted, reason::kDeviceMemoryFull));
  EXPECT_EQ(device.allocated_bytes(), 0);
}

// Wherever the device fails, the pass returns that and does not go on.
TEST_P(DeviceGptOrder, AFailureOfTheDeviceIsThePasses) {
  const Batch batch = SomeBatch(kConfig, 2, 16);
  int operations = 0;
  fail_ = [&](absl::string_view, absl::string_view) {
    ++operations;
    return absl::OkStatus();
  };
  ExpectOk(Pass(batch, {}));
  ASSERT_GT(operations, 50);
  const int all = operations;
  for (int failing = 1; failing <= all; failing += 7) {
    operations = 0;
    fail_ = [&](absl::string_view operation, absl::string_view what) {
      return ++operations == failing ? absl::InternalError(absl::StrCat(operation, " ", what))
                                     : absl::OkStatus();
    };
    const absl::Status status = Pass(batch, {});
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << failing;
    EXPECT_EQ(operations, failing);
  }
  fail_ = nullptr;
}

}  // namespace
}  // namespace ballast::worker
