// Jobs with a mesh through client/ballast.h: each rank has its shards alone, as torch's DTensor has
// them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "client/ballast.h"
#include "tests/client/c_api/c_refused.h"
#include "tests/support/plain_adamw.h"
#include "tests/support/service_for_tests.h"

namespace ballast::client::c_mesh_test {
namespace {

constexpr int kRanks = 4;  // A mesh of 2 x 2.
constexpr int32_t kWhole = BALLAST_REPLICATE;

struct Shape {
  std::array<int64_t, 2> extents;
  std::array<int32_t, 2> placements;
  int64_t elements() const { return extents[0] * extents[1]; }
};
// By rows and columns; by rows, in two replicas; by rows twice, so that two ranks have nothing; on
// one rank; of no elements; longer than a chunk.
constexpr Shape kShapes[] = {{{7, 6}, {0, 1}},           {{5, 3}, {kWhole, 0}},
                             {{3, 4}, {0, 0}},           {{1, 9}, {kWhole, kWhole}},
                             {{3, 0}, {kWhole, kWhole}}, {{90, 20}, {0, kWhole}}};
constexpr int kParameters = std::size(kShapes);

// The elements of a rank's shard of a parameter, by their places in the whole, by torch.chunk's
// rule.
std::vector<int64_t> ElementsOfShard(const Shape& shape, int rank) {
  int64_t begin[2] = {0, 0}, end[2] = {shape.extents[0], shape.extents[1]};
  const int coordinates[2] = {rank / 2, rank % 2};
  for (int m = 0; m < 2; ++m) {
    const int32_t dim = shape.placements[m];
    if (dim == kWhole) continue;
    const int64_t share = (end[dim] - begin[dim] + 1) / 2;
    begin[dim] = std::min(begin[dim] + coordinates[m] * share, end[dim]);
    end[dim] = std::min(begin[dim] + share, end[dim]);
  }
  std::vector<int64_t> elements;
  for (int64_t i = begin[0]; i < end[0]; ++i) {
    for (int64_t j = begin[1]; j < end[1]; ++j) elements.push_back(i * shape.extents[1] + j);
  }
  return elements;
}

bool IsOwner(const Shape& shape, int rank) {
  return (shape.placements[0] != kWhole || rank / 2 == 0) &&
         (shape.placements[1] != kWhole || rank % 2 == 0);
}

float FirstWeight(int parameter, int64_t element) {
  return 0.01f * static_cast<float>((parameter * 31 + element * 7) % 101 - 50);
}
float Gradient(uint64_t step, int parameter, int64_t element) {
  const auto number = static_cast<int64_t>((step * 13 + parameter * 17 + element * 5) % 89);
  return 0.03f * static_cast<float>(number - 44);
}

// A rank with its shards in fp32. Pointers to what it does not own are null.
class MeshRank {
 public:
  MeshRank(const std::string& service, int rank) : service_(service), rank_(rank) {
    for (int p = 0; p < kParameters; ++p) {
      elements_.push_back(ElementsOfShard(kShapes[p], rank));
      weights_.emplace_back(elements_[p].size(), std::numeric_limits<float>::quiet_NaN());
      names_[p] = {'p', static_cast<char>('0' + p), '\0'};
      parameters_[p] = {.size = sizeof(ballast_parameter),
                        .name = names_[p].data(),
                        .shape = kShapes[p].extents.data(),
                        .dimensions = 2,
                        .placements = kShapes[p].placements.data()};
      places_.push_back(Owns(p) ? weights_[p].data() : nullptr);
    }
    options_.weights = places_.data();
  }
  ~MeshRank() { ballast_close(session_); }
  MeshRank(const MeshRank&) = delete;
  MeshRank& operator=(const MeshRank&) = delete;

  bool Owns(int p) const { return !elements_[p].empty() && IsOwner(kShapes[p], rank_); }
  int32_t Open() { return ballast_open(&options_, &session_); }

  void Train(uint64_t steps) {
    ASSERT_EQ(Open(), BALLAST_OK) << ballast_message();
    ASSERT_EQ(ballast_upload_weights(session_, Values(FirstWeight).data(), kParameters), BALLAST_OK)
        << ballast_message();
    ASSERT_EQ(ballast_read_weights(session_), BALLAST_OK) << ballast_message();
    ExpectTrained(0);
    for (uint64_t step = 1; step <= steps; ++step) {
      const ballast_step begun = {.size = sizeof(begun)};
      ASSERT_EQ(ballast_begin_step(session_, &begun), BALLAST_OK) << ballast_message();
      const auto gradients = Values([step](int p, int64_t i) { return Gradient(step, p, i); });
      ASSERT_EQ(
          ballast_push_gradients(
              session_, 0, reinterpret_cast<const void* const*>(gradients.data()), kParameters, 0),
          BALLAST_OK)
          << ballast_message();
      ballast_decision decision = {.size = sizeof(decision)};
      ASSERT_EQ(ballast_seal_and_vote(session_, 1, nullptr, &decision), BALLAST_OK)
          << ballast_message();
      ASSERT_TRUE(decision.applied) << ballast_message();
      double squares = 0;
      for (int p = 0; p < kParameters; ++p) {
        for (int64_t i = 0; i < kShapes[p].elements(); ++i) {
          squares += std::pow(Gradient(step, p, i), 2);
        }
      }
      EXPECT_NEAR(decision.norm, std::sqrt(squares), 1e-9 * std::sqrt(squares));
      ASSERT_EQ(ballast_receive_weights(session_), BALLAST_OK) << ballast_message();
      ExpectTrained(step);
    }
  }

  void ExpectTrained(uint64_t steps) {
    for (int p = 0; p < kParameters; ++p) {
      for (size_t at = 0; at < elements_[p].size(); ++at) {
        if (!Owns(p)) {
          ASSERT_TRUE(std::isnan(weights_[p][at])) << "not this rank's to write";
          continue;
        }
        const int64_t i = elements_[p][at];
        PlainAdamW expected{.weight = FirstWeight(p, i),
                            .values = {.lr = 0.01, .beta2 = 0.95, .weight_decay = 0}};
        for (uint64_t step = 1; step <= steps; ++step) expected.Update(Gradient(step, p, i));
        ASSERT_NEAR(weights_[p][at], expected.weight, 2e-6)
            << "parameter " << p << " element " << i;
      }
    }
  }

  int64_t OwnElements() const {
    int64_t own = 0;
    for (int p = 0; p < kParameters; ++p) own += Owns(p) ? elements_[p].size() : 0;
    return own;
  }
  // What the pieces of its chunks say that it has of each parameter.
  std::vector<int64_t> ElementsOfPieces() const {
    size_t chunks = 0;
    EXPECT_EQ(ballast_chunks(session_, nullptr, 0, &chunks), BALLAST_OK);
    std::vector<ballast_chunk> list(chunks);
    EXPECT_EQ(ballast_chunks(session_, list.data(), chunks, &chunks), BALLAST_OK);
    std::vector<int64_t> next(kParameters, 0);
    for (const ballast_chunk& chunk : list) {
      size_t count = 0;
      EXPECT_EQ(ballast_pieces(session_, chunk.index, nullptr, 0, &count), BALLAST_OK);
      std::vector<ballast_piece> pieces(count);
      EXPECT_EQ(ballast_pieces(session_, chunk.index, pieces.data(), count, &count), BALLAST_OK);
      for (const ballast_piece& piece : pieces) {
        EXPECT_EQ(piece.offset, next[piece.parameter]) << "the shard in order, without gaps";
        EXPECT_LE(piece.chunk_offset + piece.elements, chunk.elements);
        next[piece.parameter] += piece.elements;
      }
    }
    return next;
  }

  ballast_job& job() { return job_; }
  ballast_parameter& parameter(int p) { return parameters_[p]; }
  ballast_mesh_dim& mesh(int dim) { return mesh_[dim]; }
  std::vector<void*>& places() { return places_; }
  ballast_session* session() { return session_; }

 private:
  // Pointers to value(parameter, element of the whole), of what this rank owns.
  template <class Value>
  std::vector<const float*> Values(Value value) {
    values_.assign(kParameters, {});
    std::vector<const float*> pointers;
    for (int p = 0; p < kParameters; ++p) {
      for (const int64_t i : elements_[p]) values_[p].push_back(value(p, i));
      pointers.push_back(Owns(p) ? values_[p].data() : nullptr);
    }
    return pointers;
  }

  const std::string service_;
  const int rank_;
  std::vector<std::vector<int64_t>> elements_;
  std::vector<std::vector<float>> weights_, values_;
  std::vector<void*> places_;
  std::array<char, 3> names_[kParameters];
  ballast_parameter parameters_[kParameters];
  ballast_group group_ = {.size = sizeof(ballast_group),
                          .name = "all",
                          .hyper_parameters = {.lr = 0.01,
                                               .beta1 = 0.9,
                                               .beta2 = 0.95,
                                               .eps = 1e-8,
                                               .decoupled_weight_decay = 1,
                                               .bias_correction = 1}};
  ballast_mesh_dim mesh_[2] = {{sizeof(ballast_mesh_dim), "dp", 2},
                               {sizeof(ballast_mesh_dim), "tp", 2}};
  ballast_job job_ = {.size = sizeof(ballast_job),
                      .name = "mesh",
                      .groups = &group_,
                      .group_count = 1,
                      .parameters = parameters_,
                      .parameter_count = kParameters,
                      .world_size = kRanks,
                      .chunk_elements = 256,
                      .mesh = mesh_,
                      .mesh_dimensions = 2};
  ballast_options options_ = {.size = sizeof(ballast_options),
                              .service = service_.c_str(),
                              .job = &job_,
                              .rank = rank_,
                              .wait_seconds = 20};
  ballast_session* session_ = nullptr;
};

class CMesh : public testing::Test {
 protected:
  std::string service() { return service_.server().addresses()[0]; }
  ServiceForTests service_;
};

TEST_F(CMesh, EachRankTrainsItsShards) {
  std::atomic<int64_t> own = 0;
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back([&, r] {
      MeshRank rank(service(), r);
      rank.Train(4);
      own += rank.OwnElements();
      const std::vector<int64_t> pieces = rank.ElementsOfPieces();
      for (int p = 0; p < kParameters; ++p) {
        const auto expected =
            static_cast<int64_t>(rank.Owns(p) ? ElementsOfShard(kShapes[p], r).size() : 0);
        EXPECT_EQ(pieces[p], expected) << "rank " << r << " parameter " << p;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  int64_t all = 0;
  for (const Shape& shape : kShapes) all += shape.elements();
  EXPECT_EQ(own, all) << "each element has one owner";
}

TEST_F(CMesh, RefusesPlacementsThatDoNotFit) {
  const auto refused = [&](auto change) {
    MeshRank rank(service(), 0);
    change(rank);
    EXPECT_TRUE(Refused(rank.Open(), BALLAST_INVALID_ARGUMENT));
  };
  const int32_t third[] = {0, 2}, below[] = {-2, 0};
  refused([&](MeshRank& r) { r.parameter(0).placements = third; });
  refused([&](MeshRank& r) { r.parameter(1).placements = below; });
  refused([](MeshRank& r) { r.parameter(2).placements = nullptr; });
  refused([](MeshRank& r) { r.job().mesh_dimensions = 0; });
  refused([](MeshRank& r) { r.mesh(1).ranks = 3; });
  refused([](MeshRank& r) { r.mesh(1).name = "dp"; });
  refused([](MeshRank& r) { r.mesh(0).name = nullptr; });
  refused([](MeshRank& r) { r.mesh(0).size = 0; });
  refused([](MeshRank& r) { r.job().mesh = nullptr; });
  refused([](MeshRank& r) { r.job().mesh_dimensions = 65; });
  refused([](MeshRank& r) { r.job().bucket_elements = 512; });
  refused([](MeshRank& r) { r.places()[0] = nullptr; });
  refused([](MeshRank& r) { r.job().chunk_elements = 100; });
}

// A frozen parameter is nobody's to cut.
TEST_F(CMesh, AFrozenParameterNeedsNoPlacements) {
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back([&, r] {
      MeshRank rank(service(), r);
      rank.parameter(3).frozen = 1;
      rank.parameter(3).placements = nullptr;
      rank.places()[3] = nullptr;
      EXPECT_EQ(rank.Open(), BALLAST_OK) << ballast_message();
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace
}  // namespace ballast::client::c_mesh_test
