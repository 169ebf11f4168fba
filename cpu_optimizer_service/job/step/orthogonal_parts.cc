#include "cpu_optimizer_service/job/step/orthogonal_parts.h"

#include <algorithm>

namespace ballast {

void OrthogonalParts::Begin(absl::Span<const int> matrices) {
  for (State& state : chunks_) state.is_wanted = false;
  for (const int parameter : matrices) {
    for (const int chunk : layout_.ChunksOfParameter(parameter)) chunks_[chunk].is_wanted = true;
  }
  Forget();
}

void OrthogonalParts::End() { Begin({}); }

void OrthogonalParts::Forget() {
  missing_ = 0;
  for (State& state : chunks_) {
    state.is_given = false;
    if (state.is_wanted) ++missing_;
  }
  largest_.assign(layout_.spec().parameters.size(), 0);
}

OrthogonalParts::Wants OrthogonalParts::BeginWriting(int chunk) {
  State& state = chunks_[chunk];
  if (!state.is_wanted) return Wants::kNothing;
  if (state.is_given) return Wants::kRepeat;
  if (state.is_being_written) return Wants::kBusy;
  state.is_being_written = true;
  return Wants::kIt;
}

void OrthogonalParts::EndWriting(int chunk, bool counts, absl::Span<const Largest> largest) {
  State& state = chunks_[chunk];
  state.is_being_written = false;
  if (!counts) return;
  state.is_given = true;
  --missing_;
  for (const auto& [parameter, value] : largest) {
    largest_[parameter] = std::max(largest_[parameter], value);
  }
}

bool OrthogonalParts::are_being_written() const {
  return std::ranges::any_of(chunks_, &State::is_being_written);
}

bool OrthogonalParts::Awaits(int rank) const {
  return std::ranges::any_of(layout_.chunks_of_rank(rank), [&](int chunk) {
    return chunks_[chunk].is_wanted && !chunks_[chunk].is_given;
  });
}

std::vector<int> OrthogonalParts::RanksAwaited() const {
  std::vector<int> ranks;
  for (const int rank : layout_.ranks()) {
    if (Awaits(rank)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace ballast
