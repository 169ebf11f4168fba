#include "tests/bench/kernel_passes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/step/chunk_update.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "cpu_optimizer_service/kernels/roofline.h"

namespace ballast::bench {
namespace {

constexpr float kGradient = 0.01f;
constexpr float kDenormal = 1e-39f;

AdamScalars ScalarsOf(WeightDecay decay) {
  HyperParameters values;
  values.weight_decay = decay == WeightDecay::kNone ? 0 : 0.01;
  values.decoupled_weight_decay = decay == WeightDecay::kDecoupled;
  return MakeAdamScalars(values, /*update_count=*/10, /*multiplier=*/1);
}

}  // namespace

KernelPasses::KernelPasses(int64_t chunks, int threads)
    : chunks_(chunks),
      pool_(threads),
      arenas_(MakeAnonymousArenaFactory(&pool_)),
      sums_(chunks * kMaxChunkElements / kBlockElements) {}

absl::StatusOr<std::unique_ptr<KernelPasses>> KernelPasses::Create(int64_t chunks, int threads) {
  std::unique_ptr<KernelPasses> passes(new KernelPasses(chunks, threads));
  const auto create = [&](int64_t bytes_per_element) {
    return passes->arenas_->Create(passes->elements() * bytes_per_element, "the kernel benchmark",
                                   ArenaFactory::Touch::kNow);
  };
  BALLAST_ASSIGN_OR_RETURN(passes->gradient_, create(4));
  BALLAST_ASSIGN_OR_RETURN(passes->last_, create(2));
  BALLAST_ASSIGN_OR_RETURN(passes->shard_, create(4));
  BALLAST_RETURN_IF_ERROR(passes->CreateStore());
  passes->ForChunks([&](int64_t chunk) {
    std::fill_n(passes->At<uint16_t>(passes->last_, chunk), kMaxChunkElements,
                FloatToBFloat16(kGradient));
    std::fill_n(passes->PlaneAt(Plane::kMaster, chunk), kMaxChunkElements, 0.5f);
  });
  passes->Fill(DType::kBFloat16, /*denormal=*/false);
  return passes;
}

absl::Status KernelPasses::CreateStore() {
  store_layout_ = std::make_unique<Layout>(LayoutOf(1));
  BALLAST_ASSIGN_OR_RETURN(
      store_,
      ChunkStore::Create(*store_layout_,
                         {.planes = {3}, .budget = &budget_, .owner = "the benchmark"}, *arenas_));
  return absl::OkStatus();
}

absl::Status KernelPasses::AddAmsgradPlane() {
  BALLAST_ASSIGN_OR_RETURN(max_exp_avg_sq_, arenas_->Create(elements() * 4, "the amsgrad benchmark",
                                                            ArenaFactory::Touch::kNow));
  return absl::OkStatus();
}

void KernelPasses::UseSlice(int64_t slice, int64_t slices) {
  first_chunk_ = slice * chunks_ / slices;
  end_chunk_ = (slice + 1) * chunks_ / slices;
}

float* KernelPasses::PlaneAt(Plane plane, int64_t chunk) const {
  return store_->Published(static_cast<int>(chunk))[plane];
}

void KernelPasses::ForChunks(absl::FunctionRef<void(int64_t)> body) {
  if (!one_thread_) {
    return pool_.ForEach(end_chunk_ - first_chunk_,
                         [&](int64_t index) { body(first_chunk_ + index); });
  }
  for (int64_t chunk = first_chunk_; chunk < end_chunk_; ++chunk) body(chunk);
}

int64_t KernelPasses::TrafficBytes(const Options& options) {
  return SizeBytes(options.gradient) + (options.amsgrad ? 4 : 3) * 2 * 4 +
         (options.has_shard ? SizeBytes(options.shard) : 0);
}

void KernelPasses::Fill(DType dtype, bool denormal) {
  const float gradient = denormal ? kDenormal : kGradient;
  ForChunks([&](int64_t chunk) {
    std::byte* to = gradient_->data() + chunk * kMaxChunkElements * SizeBytes(dtype);
    std::vector<float> tile(kTileElements, gradient);
    for (int64_t begin = 0; begin < kMaxChunkElements; begin += kTileElements) {
      ConvertFromFloat(tile.data(), to + begin * SizeBytes(dtype), dtype, kTileElements);
    }
    std::fill_n(PlaneAt(Plane::kExpAvg, chunk), kMaxChunkElements, gradient);
    std::fill_n(PlaneAt(Plane::kExpAvgSq, chunk), kMaxChunkElements,
                denormal ? kDenormal : gradient * gradient);
  });
}

AdamRun KernelPasses::Run(int64_t chunk, const Options& options) const {
  const int64_t begin = chunk * kMaxChunkElements;
  float* max_exp_avg_sq = options.amsgrad ? At<float>(max_exp_avg_sq_, chunk) : nullptr;
  return {.elements = kMaxChunkElements,
          .gradient = gradient_->data() + begin * SizeBytes(options.gradient),
          .gradient_dtype = options.gradient,
          .master = PlaneAt(Plane::kMaster, chunk),
          .exp_avg = PlaneAt(Plane::kExpAvg, chunk),
          .exp_avg_sq = PlaneAt(Plane::kExpAvgSq, chunk),
          .max_exp_avg_sq = max_exp_avg_sq,
          .new_master = PlaneAt(Plane::kMaster, chunk),
          .new_exp_avg = PlaneAt(Plane::kExpAvg, chunk),
          .new_exp_avg_sq = PlaneAt(Plane::kExpAvgSq, chunk),
          .new_max_exp_avg_sq = max_exp_avg_sq,
          .shard = options.has_shard ? shard_->data() + begin * SizeBytes(options.shard) : nullptr,
          .shard_dtype = options.shard,
          .scalars = ScalarsOf(options.decay)};
}

void KernelPasses::Roofline(int prefetch_ahead_elements) {
  ForChunks([&](int64_t chunk) {
    MoveAdamTraffic({.elements = kMaxChunkElements,
                     .gradient = At<uint16_t>(gradient_, chunk),
                     .planes = {PlaneAt(Plane::kMaster, chunk), PlaneAt(Plane::kExpAvg, chunk),
                                PlaneAt(Plane::kExpAvgSq, chunk)},
                     .shard = At<uint16_t>(shard_, chunk)},
                    prefetch_ahead_elements);
  });
}

void KernelPasses::Update(const Options& options) {
  ForChunks([&](int64_t chunk) { UpdateAdam(Run(chunk, options)); });
}

Layout KernelPasses::LayoutOf(int tensors) const {
  LayoutSpec spec;
  spec.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = elements()}};
  for (int64_t tensor = 0; tensor < tensors; ++tensor) {
    const int64_t begin = tensor * elements() / tensors;
    const int64_t end = (tensor + 1) * elements() / tensors;
    spec.parameters.push_back({.name = absl::StrCat("p", tensor), .shape = {end - begin}});
  }
  return Layout::Create(std::move(spec)).value();
}

void KernelPasses::ThroughStore(const Layout& layout) {
  const HyperParameters values;
  ++step_;
  const std::vector<int64_t> update_counts(layout.spec().parameters.size(), 10);
  ForChunks([&](int64_t index) {
    const int chunk = static_cast<int>(index);
    const ChunkStore::Write write = store_->BeginWrite(chunk, Destination::kInPlaceIfFree).value();
    UpdateChunk({.layout = &layout,
                 .chunk = chunk,
                 .gradient = {At<uint16_t>(gradient_, index), DType::kBFloat16},
                 .from = write.from,
                 .to = write.to,
                 .hyper_parameters = &values,
                 .multiplier = 1,
                 .shard = At<uint16_t>(shard_, index)},
                [&](int parameter) { return update_counts[parameter]; });
    store_->Publish(write, step_);
  });
}

void KernelPasses::Sums(DType dtype) {
  constexpr int64_t kBlocks = kMaxChunkElements / kBlockElements;
  ForChunks([&](int64_t chunk) {
    BlockSumsOfSquares(gradient_->data() + chunk * kMaxChunkElements * SizeBytes(dtype), dtype,
                       absl::MakeSpan(sums_).subspan(chunk * kBlocks, kBlocks));
  });
}

void KernelPasses::Add() {
  ForChunks([&](int64_t chunk) {
    AddGradient(At<float>(gradient_, chunk), At<uint16_t>(last_, chunk), DType::kBFloat16,
                kMaxChunkElements);
  });
}

void KernelPasses::ArriveAdded() {
  constexpr int64_t kBlocks = kMaxChunkElements / kBlockElements;
  ForChunks([&](int64_t chunk) {
    float* sum = At<float>(gradient_, chunk);
    AddGradient(sum, At<uint16_t>(last_, chunk), DType::kBFloat16, kMaxChunkElements);
    BlockSumsOfSquares(sum, DType::kFloat32,
                       absl::MakeSpan(sums_).subspan(chunk * kBlocks, kBlocks));
  });
}

void KernelPasses::UpdateAdded() { Update({.gradient = DType::kFloat32}); }

void KernelPasses::ForTilesOfSum(int64_t chunk,
                                 absl::FunctionRef<void(const float*, int64_t)> body) const {
  const float* sum = At<float>(gradient_, chunk);
  const uint16_t* last = At<uint16_t>(last_, chunk);
  float tile[kTileElements];
  for (int64_t begin = 0; begin < kMaxChunkElements; begin += kTileElements) {
    std::memcpy(tile, sum + begin, sizeof(tile));
    AddGradient(tile, last + begin, DType::kBFloat16, kTileElements);
    body(tile, begin);
  }
}

void KernelPasses::ArriveApart() {
  constexpr int64_t kTileBlocks = kTileElements / kBlockElements;
  ForChunks([&](int64_t chunk) {
    ForTilesOfSum(chunk, [&](const float* tile, int64_t begin) {
      const int64_t block = (chunk * kMaxChunkElements + begin) / kBlockElements;
      BlockSumsOfSquares(tile, DType::kFloat32, absl::MakeSpan(sums_).subspan(block, kTileBlocks));
    });
  });
}

void KernelPasses::UpdateApart() {
  ForChunks([&](int64_t chunk) {
    const AdamRun whole = Run(chunk, {.gradient = DType::kFloat32});
    ForTilesOfSum(chunk, [&](const float* tile, int64_t begin) {
      AdamRun run = whole;
      run.elements = kTileElements;
      run.gradient = tile;
      run.master = run.new_master = whole.new_master + begin;
      run.exp_avg = run.new_exp_avg = whole.new_exp_avg + begin;
      run.exp_avg_sq = run.new_exp_avg_sq = whole.new_exp_avg_sq + begin;
      run.shard = static_cast<uint16_t*>(whole.shard) + begin;
      UpdateAdam(run);
    });
  });
}

}  // namespace ballast::bench
