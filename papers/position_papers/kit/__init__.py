"""What every paper needs: claims, rules, verdicts, the cache of measurements, the build of a paper's page. Knows no paper."""
