#include "cpu_optimizer_service/common/text/suggestions.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

TEST(EditDistance, CountsEdits) {
  EXPECT_EQ(EditDistance("", ""), 0);
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("abc", ""), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
  EXPECT_EQ(EditDistance("h.0.attn.w", "h.1.attn.w"), 1);
}

TEST(Suggestions, NearestComeFirstAndFarOnesNotAtAll) {
  EXPECT_EQ(Suggestions("wtee", {"wpe", "h.0.mlp.w", "wte"}),
            (std::vector<std::string>{"wte", "wpe"}));
  EXPECT_EQ(Suggestions("attn.w", {"h.0.attn.w", "h.1.attn.w", "h.2.attn.w", "h.3.attn.w"}).size(),
            3u);
  EXPECT_TRUE(Suggestions("embedding", {"h.0.mlp.w"}).empty());
}

TEST(Suggestion, SaysWhatThereIsIfNothingIsNear) {
  EXPECT_EQ(Suggestion("wtee", {"wte"}), "; did you mean wte?");
  EXPECT_EQ(Suggestion("zzzzz", {"a", "b"}), "; there are a, b");
  EXPECT_EQ(Suggestion("zzzzz", {}), "; there are none");
  EXPECT_EQ(Suggestion("zzzzz", std::vector<std::string>(20, "aaaaaaaaaa")),
            "; there are 20, such as aaaaaaaaaa");
}

}  // namespace
}  // namespace ballast
