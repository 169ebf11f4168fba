#include "client/session/weight_sink.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

#include "tests/client/job_for_tests.h"

namespace ballast::client {
namespace {

class WeightSinkTest : public testing::Test {
 protected:
  WeightSinkTest()
      : job_(SmallJob("j", 1)),
        layout_(Layout::Create(job_.layout).value()),
        weights_([this](int chunk) { return Memory(chunk); }),
        on_weights_([this](int chunk) { complete_.push_back(chunk); }),
        sink_(layout_, job_.groups, 0, weights_, on_weights_) {
    sink_.Begin();
  }

  absl::Span<std::byte> Memory(int chunk) {
    const Chunk& place = layout_.chunks()[chunk];
    std::string& memory = memory_[chunk];
    memory.resize(place.elements * SizeBytes(job_.groups[place.group].return_dtype) + excess_);
    return absl::MakeSpan(reinterpret_cast<std::byte*>(memory.data()), memory.size());
  }
  absl::Status Place(uint32_t chunk, const std::vector<std::string>& pieces) {
    v1::WeightHeader header;
    header.set_chunk(chunk);
    std::vector<absl::Span<const std::byte>> spans;
    for (const std::string& piece : pieces) {
      spans.emplace_back(reinterpret_cast<const std::byte*>(piece.data()), piece.size());
    }
    return sink_.Place(header, spans);
  }

  const JobSpec job_;
  const Layout layout_;
  size_t excess_ = 0;
  std::map<int, std::string> memory_;
  std::vector<int> complete_;
  const std::function<absl::Span<std::byte>(int)> weights_;
  const std::function<void(int)> on_weights_;
  WeightSink sink_;
};

std::string Pattern(size_t bytes) {
  std::string pattern(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) pattern[i] = static_cast<char>(i * 7 + i / 256);
  return pattern;
}

TEST_F(WeightSinkTest, JoinsPiecesCutAnywhere) {
  const std::string whole = Pattern(512);
  EXPECT_EQ(sink_.missing_chunks(), 5);
  ASSERT_TRUE(Place(1, {whole.substr(0, 1), "", whole.substr(1, 332), whole.substr(333)}).ok());
  EXPECT_EQ(memory_[1], whole);
  EXPECT_EQ(complete_, std::vector<int>{1});
  EXPECT_EQ(sink_.missing_chunks(), 4);
  const std::string wide = Pattern(1024);  // The fp32 group.
  ASSERT_TRUE(Place(4, {wide}).ok());
  EXPECT_EQ(memory_[4], wide);
}

TEST_F(WeightSinkTest, RefusesWhatIsNotExpectedBeforeWriting) {
  const std::string whole = Pattern(512);
  EXPECT_EQ(Place(0, {whole.substr(1)}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Place(0, {whole, "x"}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Place(5, {whole}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Place(1u << 31, {whole}).code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(memory_.empty());
  ASSERT_TRUE(Place(0, {whole}).ok());
  EXPECT_EQ(Place(0, {Pattern(512)}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(complete_, std::vector<int>{0});
  excess_ = 2;
  EXPECT_EQ(Place(1, {whole}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sink_.missing_chunks(), 4);
}

TEST(WeightSink, RefusesChunksOfOtherRanks) {
  const JobSpec job = SmallJob("j", 2);
  const Layout layout = Layout::Create(job.layout).value();
  std::string memory(512, '\0');
  const std::function<absl::Span<std::byte>(int)> weights = [&](int) {
    return absl::MakeSpan(reinterpret_cast<std::byte*>(memory.data()), memory.size());
  };
  const std::function<void(int)> on_weights;
  WeightSink sink(layout, job.groups, 1, weights, on_weights);
  sink.Begin();
  const std::string whole = Pattern(512);
  const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(whole.data()), 512);
  v1::WeightHeader header;
  header.set_chunk(static_cast<uint32_t>(layout.chunks_of_rank(0)[0]));
  EXPECT_EQ(sink.Place(header, {piece}).code(), absl::StatusCode::kDataLoss);
  header.set_chunk(static_cast<uint32_t>(layout.chunks_of_rank(1)[0]));
  EXPECT_TRUE(sink.Place(header, {piece}).ok());
  EXPECT_EQ(memory, whole);
}

}  // namespace
}  // namespace ballast::client
