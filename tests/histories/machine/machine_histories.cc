#include "tests/histories/machine/machine_histories.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/job/step/step_machine.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/histories/machine/machine_model.h"
#include "tests/histories/random.h"

namespace ballast::histories {
namespace {

constexpr int kMostRanks = 3;

struct Shape {
  explicit Shape(int ranks)
      : spec(MakeJobSpec({.group_sizes = {{700, 512}},
                          .world_size = ranks,
                          .bucket_elements = 256,
                          .chunk_elements = 512})),
        layout(Layout::Create(spec.layout).value()) {
    spec.unused_policy = UnusedPolicy::kSkip;
    for (const Chunk& chunk : layout.chunks()) rank_of_chunk.push_back(chunk.rank);
  }
  JobSpec spec;
  Layout layout;
  std::vector<int> rank_of_chunk;
};

StepVote VoteOf(int which) { return {.apply = which > 0, .clipping = {.max_norm = 1.0 * which}}; }

class Player {
 public:
  Player(uint64_t seed, const Shape& shape, MachineTally& tally)
      : random_(seed),
        shape_(shape),
        tally_(tally),
        machine_(std::make_unique<StepMachine>(shape.spec, shape.layout)),
        model_(shape.layout.world_size(), shape.rank_of_chunk) {}

  // Empty, or what differs.
  std::string Play() {
    for (int events = random_.Between(8, 120); events > 0; --events) {
      ++tally_.events;
      std::string wrong = Event();
      if (wrong.empty()) wrong = Difference();
      if (!wrong.empty()) return absl::StrCat(story_, "  ", wrong);
    }
    return "";
  }

 private:
  static constexpr auto kHalfAdded = [](int) { return false; };
  static constexpr auto kHasGradient = [](const ChunkPiece&) { return false; };

  StepBefore Before() const {
    return {.step = model_.committed,
            .micro_steps = last_micro_steps_,
            .vote = last_vote_,
            .hyper_parameters = hyper_parameters_};
  }

  template <typename... Parts>
  void Note(const Parts&... parts) {
    absl::StrAppend(&story_, "  ", parts..., "\n");
  }
  static std::string Compare(Said expected, Said said) {
    if (expected == said) return "";
    return absl::StrCat("expected ", static_cast<int>(expected), ", said ", static_cast<int>(said));
  }
  std::string Is(Said expected, Said said) {
    tally_.refused += said == Said::kError ? 1 : 0;
    tally_.repeats += said == Said::kRepeat ? 1 : 0;
    return Compare(expected, said);
  }

  // Mostly what an honest rank says next, and now and then anything.
  std::string Event() {
    const int r = random_.Below(shape_.layout.world_size());
    const MachineModel::Rank& rank = model_.ranks[r];
    const uint64_t step = model_.committed + (random_.OneIn(24) ? random_.Below(3) : 1);
    uint32_t attempt = rank.attempt;
    if (random_.OneIn(24)) attempt += random_.Pick({-1, 1}) + (attempt == 0 ? 1 : 0);
    StepEffects effects;
    std::string wrong = One(r, step, attempt, effects);
    if (effects.voted) machine_->GoOn();
    for (StepWord& word : effects.words) words_.push_back(std::move(word));
    return wrong;
  }

  std::string One(int r, uint64_t step, uint32_t attempt, StepEffects& effects) {
    using Stage = MachineModel::Stage;
    if (model_.stage == Stage::kSealed && random_.OneIn(2)) return Sums(effects);
    if (model_.stage == Stage::kDecided && random_.OneIn(2)) return Commit();
    if (!random_.OneIn(5)) return Next(r, step, attempt, effects);
    switch (random_.Below(12)) {
      case 0:
        return Die();
      case 1:
        if (model_.stage != Stage::kDecided && random_.OneIn(4)) return Drop();
        return Discard(r, step, attempt, effects);
      case 2:
        return Discard(r, step, attempt, effects);
      case 3:
        return Vote(r, step, attempt, effects);
      case 4:
      case 5:
        return Seal(r, step, attempt, effects);
      case 6:
      case 7:
        return EndMicroStep(r, step, attempt, effects);
      case 8:
        return Begin(r, step, attempt, effects);
      default:
        return Contribute(r, -1, step, attempt, effects);
    }
  }

  // What a rank does that wants the step done.
  std::string Next(int r, uint64_t step, uint32_t attempt, StepEffects& effects) {
    const MachineModel::Rank& rank = model_.ranks[r];
    if (!rank.begun) return Begin(r, step, attempt, effects);
    for (const int chunk : shape_.layout.chunks_of_rank(r)) {
      if (model_.chunks[chunk].next < micro_steps_) {
        return Contribute(r, chunk, step, attempt, effects);
      }
    }
    if (rank.ended < micro_steps_) return EndMicroStep(r, step, attempt, effects);
    if (!rank.sealed.has_value()) return Seal(r, step, attempt, effects);
    // It has to follow a rank that has discarded.
    for (const MachineModel::Rank& other : model_.ranks) {
      if (other.attempt > rank.attempt) return Discard(r, step, attempt, effects);
    }
    return Vote(r, step, attempt, effects);
  }

  std::string Begin(int r, uint64_t step, uint32_t attempt, StepEffects& effects) {
    const int settings = random_.OneIn(16) ? 2 : 1;
    Note("rank ", r, " begins ", step, ".", attempt, " with ", settings);
    const bool had_begun = model_.ranks[r].begun;
    const absl::Status begun = machine_->Begin(Before(), r, {step, attempt},
                                               {.scale = {.loss_scale = 1.0 * settings}}, effects);
    return Is(model_.Begin(r, step, attempt, settings), !begun.ok() ? Said::kError
                                                        : had_begun ? Said::kRepeat
                                                                    : Said::kTaken);
  }

  // -1: any chunk of the rank.
  std::string Contribute(int r, int c, uint64_t step, uint32_t attempt, StepEffects& effects) {
    const absl::Span<const int> chunks = shape_.layout.chunks_of_rank(r);
    if (chunks.empty()) return "";
    if (c == -1) c = chunks[random_.Below(static_cast<int>(chunks.size()))];
    const uint32_t begin =
        random_.OneIn(8) ? static_cast<uint32_t>(random_.Below(3)) : model_.chunks[c].next;
    const uint32_t end = begin + static_cast<uint32_t>(random_.OneIn(8) ? 2 : 1);
    const bool final = end == micro_steps_ ? random_.OneIn(2) : random_.OneIn(24);
    const bool empty = random_.OneIn(24);
    Note("rank ", r, " gives ", step, ".", attempt, " chunk ", c, " [", begin, ", ", end, ")",
         final ? " final" : "", empty ? " empty" : "");
    const auto wants = machine_->CheckContribution(Before(), r, {step, attempt}, c, begin, end);
    Said said = Said::kError;
    if (wants.ok() && *wants == StepMachine::Wants::kDiscarded) said = Said::kDropped;
    if (wants.ok() && *wants == StepMachine::Wants::kRepeat) said = Said::kRepeat;
    if (wants.ok() && *wants == StepMachine::Wants::kIt) {
      said = Said::kTaken;
      if (empty) machine_->Empty(r, c, begin, end, effects);
      machine_->Added(c, end, final);
    }
    return Is(model_.Contribute(c, step, attempt, begin, end, final, empty), said);
  }

  std::string EndMicroStep(int r, uint64_t step, uint32_t attempt, StepEffects& effects) {
    const uint32_t micro_step =
        random_.OneIn(8) ? static_cast<uint32_t>(random_.Below(3)) : model_.ranks[r].ended;
    const bool uses = !random_.OneIn(6);
    Note("rank ", r, " ends ", step, ".", attempt, " micro-step ", micro_step,
         uses ? "" : " unused");
    const absl::Status ended = machine_->EndMicroStep(Before(), r, {step, attempt}, micro_step,
                                                      {.all = uses, .parameters = {}}, effects);
    const Said expected = model_.EndMicroStep(r, step, attempt, micro_step, uses);
    if (expected == Said::kRepeat && !effects.words.empty()) return "a repeat is kept again";
    return Is(expected, !ended.ok()             ? Said::kError
                        : effects.words.empty() ? Said::kRepeat
                                                : Said::kTaken);
  }

  std::string Seal(int r, uint64_t step, uint32_t attempt, StepEffects& effects) {
    const uint32_t ended = model_.ranks[r].ended;
    const uint32_t n =
        random_.OneIn(6) || ended == 0 ? static_cast<uint32_t>(random_.Between(1, 3)) : ended;
    std::optional<int> vote;
    if (random_.OneIn(2)) vote = random_.OneIn(8) ? 0 : 1;
    Note("rank ", r, " seals ", step, ".", attempt, " with ", n, " votes ", vote.value_or(-1));
    std::optional<StepVote> its_vote;
    if (vote.has_value()) its_vote = VoteOf(*vote);
    const auto sealed =
        machine_->Seal(Before(), r, {step, attempt}, n, its_vote,
                       {.half_added = kHalfAdded, .has_gradient = kHasGradient}, effects);
    const Said said = !sealed.ok()          ? Said::kError
                      : sealed->has_value() ? Said::kRefused
                                            : Said::kTaken;
    tally_.refused_seals += said == Said::kRefused ? 1 : 0;
    return Is(model_.Seal(r, step, attempt, n, vote), said);
  }

  std::string Vote(int r, uint64_t step, uint32_t attempt, StepEffects& effects) {
    const int vote = random_.OneIn(8) ? 0 : 1;
    Note("rank ", r, " votes ", vote, " on ", step, ".", attempt);
    const absl::Status voted = machine_->Vote(Before(), r, {step, attempt}, VoteOf(vote), effects);
    return Is(model_.Vote(r, step, attempt, vote), voted.ok() ? Said::kTaken : Said::kError);
  }

  std::string Discard(int r, uint64_t step, uint32_t attempt, StepEffects& effects) {
    Note("rank ", r, " discards ", step, ".", attempt);
    const absl::StatusOr<bool> discarded = machine_->Discard(Before(), r, {step, attempt}, effects);
    const Said said = !discarded.ok()         ? Said::kError
                      : !*discarded           ? Said::kDropped
                      : effects.words.empty() ? Said::kRepeat
                                              : Said::kTaken;
    tally_.discards += said == Said::kTaken ? 1 : 0;
    tally_.reopened += effects.reopened ? 1 : 0;
    return Is(model_.Discard(r, step, attempt), said);
  }

  std::string Sums(StepEffects& effects) {
    Note("its sums are known");
    // The first time, or because all have voted since.
    const bool again = machine_->agreement()->is_summed();
    if (!again) machine_->SetSummed();
    const std::optional<StepVote> vote = machine_->CommonVote();
    if (!vote.has_value()) {
      machine_->AwaitLead();
      machine_->NormIsKnown(effects);
    }
    const bool decided = vote.has_value();
    for (const StepEffects::ToRank& told : effects.told) {
      tally_.void_votes += std::holds_alternative<StepEffects::VoteRefused>(told.what) ? 1 : 0;
    }
    if (model_.SumsAreKnown() != decided) return decided ? "it is decided" : "it is not decided";
    if (!decided) return "";
    ++tally_.decided;
    machine_->Decide(*vote);
    model_.stage = MachineModel::Stage::kDecided;
    return Whole();
  }

  // The promises themselves: of every rank the same attempt, of every chunk every micro-step once.
  std::string Whole() const {
    const StepAgreement& agreement = *machine_->agreement();
    for (const RankInStep& rank : agreement.ranks()) {
      if (rank.attempt != agreement.attempt() || !rank.begun ||
          rank.sealed != agreement.micro_steps() || rank.vote != agreement.vote()) {
        return "it is decided without all ranks";
      }
    }
    return machine_->ledger().IsWhole(agreement.micro_steps()) ? ""
                                                               : "it is decided without all chunks";
  }

  std::string Commit() {
    Note("it is committed");
    last_micro_steps_ = machine_->agreement()->micro_steps();
    last_vote_ = machine_->agreement()->vote();
    machine_->Drop();
    machine_->Clear();
    words_.clear();
    model_.Commit();
    micro_steps_ = random_.Between(1, 2);
    return "";
  }

  std::string Drop() {
    Note("it is dropped");
    ++tally_.dropped;
    machine_->Drop();
    machine_->Clear();
    words_.clear();
    model_.Drop();
    return "";
  }

  // Another process goes on from the words and the ledger.
  std::string Die() {
    if (model_.stage == MachineModel::Stage::kDecided) return Commit();  // It rolls forward.
    Note("the process dies");
    ++tally_.deaths;
    machine_ = std::make_unique<StepMachine>(shape_.spec, shape_.layout);
    for (const StepWord& word : words_) {
      StepEffects effects;
      if (const absl::Status replayed = machine_->Replay(Before(), word, effects); !replayed.ok()) {
        return absl::StrCat("a word is refused: ", std::string(replayed.message()));
      }
    }
    for (size_t chunk = 0; chunk < model_.chunks.size(); ++chunk) {
      const MachineModel::Chunk& found = model_.chunks[chunk];
      if (found.next > 0) machine_->Added(static_cast<int>(chunk), found.next, found.closed);
    }
    if (!machine_->between_steps()) machine_->SetTakenOver();
    // A step that was opened and of which nothing was kept is none.
    if (words_.empty() && model_.stage != MachineModel::Stage::kNone) model_.Drop();
    model_.Die();
    return "";
  }

  std::string Difference() const {
    if (static_cast<int>(model_.stage) != static_cast<int>(machine_->stage())) {
      return absl::StrCat("expected stage ", static_cast<int>(model_.stage), ", it is at ",
                          static_cast<int>(machine_->stage()));
    }
    for (size_t chunk = 0; chunk < model_.chunks.size(); ++chunk) {
      if (model_.chunks[chunk].next !=
              machine_->ledger().next_micro_step(static_cast<int>(chunk)) ||
          model_.chunks[chunk].closed != machine_->ledger().closed(static_cast<int>(chunk))) {
        return absl::StrCat("chunk ", chunk, " differs");
      }
    }
    if (machine_->between_steps()) return "";
    for (size_t rank = 0; rank < model_.ranks.size(); ++rank) {
      const RankInStep& is = machine_->agreement()->ranks()[rank];
      const MachineModel::Rank& expected = model_.ranks[rank];
      if (is.attempt != expected.attempt || is.begun != expected.begun ||
          is.sealed != expected.sealed || is.vote.has_value() != expected.vote.has_value() ||
          machine_->part().rank(static_cast<int>(rank)).micro_steps_ended != expected.ended) {
        return absl::StrCat("rank ", rank, " differs");
      }
    }
    return "";
  }

  Random random_;
  const Shape& shape_;
  MachineTally& tally_;
  std::unique_ptr<StepMachine> machine_;
  MachineModel model_;
  std::vector<StepWord> words_;  // Of the step in progress.
  uint32_t micro_steps_ = 1;     // That honest ranks give the step.
  uint32_t last_micro_steps_ = 0;
  StepVote last_vote_;
  const std::vector<HyperParameters> hyper_parameters_{1};
  std::string story_;
};

}  // namespace

std::string RunMachineHistories(uint64_t first, int64_t count, MachineTally& tally) {
  std::vector<std::unique_ptr<Shape>> shapes;
  for (int ranks = 1; ranks <= kMostRanks; ++ranks)
    shapes.push_back(std::make_unique<Shape>(ranks));
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t seed = first + static_cast<uint64_t>(i);
    const Shape& shape = *shapes[Mix(seed) % kMostRanks];
    if (const std::string wrong = Player(seed, shape, tally).Play(); !wrong.empty()) {
      return absl::StrCat("seed ", seed, ", ", shape.layout.world_size(), " ranks\n", wrong);
    }
  }
  return "";
}

}  // namespace ballast::histories
